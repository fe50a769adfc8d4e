"""`torchsparsekv board`: compare the answers of a real model, with every method at every budget."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import board

OUT = "File of finished samples (JSON lines). A run that starts again continues there. A table stands beside it as CSV."
add(app, board.BENCHMARK, board.Options, board.run, getdoc(board), Path("board.jsonl"), OUT)
