"""`torchsparsekv selecting_layers`: the layers of a model that are to choose where others reuse what they chose."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import selecting_layers

OUT = "For the result, a file that is not there yet; patch(..., selecting_layers=PATH) takes it."
add(app, selecting_layers.BENCHMARK, selecting_layers.Options, selecting_layers.run, getdoc(selecting_layers), Path("selecting_layers.json"), OUT)
