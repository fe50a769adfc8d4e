"""`torchsparsekv choosers`: the layers of a model that are to choose where others reuse what they chose."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.benchmarks.quality import choosers
from torchsparsekv.commands import app
from torchsparsekv.commands._options import add

OUT = "For the result, a file that is not there yet; patch(..., choosers=PATH) takes it."
add(app, choosers.BENCHMARK, choosers.Options, choosers.run, getdoc(choosers), Path("choosers.json"), OUT)
