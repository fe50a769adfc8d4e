"""`torchsparsekv eval`: the answers of every method beside those of the dense model."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import run

OUT = "Finished samples, JSON lines; a run that is started again goes on there. The table goes beside it as CSV."
add(app, "eval", run.Options, run.run, getdoc(run), Path("eval.jsonl"), OUT)
