"""`torchsparsekv eval-text`: compare next-token distributions on real text with those of the dense model."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import text, text_options

OUT = "File of finished samples (JSON lines). A run that starts again continues there. A table stands beside it as CSV."
add(app, text.BENCHMARK, text_options.Options, text.run, getdoc(text), Path("eval_text.jsonl"), OUT)
