"""`torchsparsekv eval`: compare the answers of every method with those of the dense model."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import run

OUT = "File of finished samples (JSON lines). A run that starts again continues there. A table stands beside it as CSV."
add(app, "eval", run.Options, run.run, getdoc(run), Path("eval.jsonl"), OUT)
