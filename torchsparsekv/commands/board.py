"""`torchsparsekv board`: every method at every budget on the tasks of a real model, from prompts that are read once."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import board

OUT = "Finished samples, JSON lines; a run that is started again goes on there. The table goes beside it as CSV."
add(app, board.BENCHMARK, board.Options, board.run, getdoc(board), Path("board.jsonl"), OUT)
