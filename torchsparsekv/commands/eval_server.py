"""`torchsparsekv eval-server`: score the answers of a running server on the samples of `eval`."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import server

OUT = "File of scores and answers (JSON)."
add(app, server.BENCHMARK, server.Options, server.run, getdoc(server), Path("eval_server.json"), OUT)
