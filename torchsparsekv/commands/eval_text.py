"""`torchsparsekv eval-text`: how far every method's next words are from those of the dense model, on real text."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import text, text_options

OUT = "Finished samples, JSON lines; a run that is started again goes on there. The table goes beside it as CSV."
add(app, text.BENCHMARK, text_options.Options, text.run, getdoc(text), Path("eval_text.jsonl"), OUT)
