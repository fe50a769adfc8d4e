"""`torchsparsekv selecting-layers`: find the layers whose selections the other layers can reuse."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import selecting_layers as module

OUT = "File for the result, which must not exist yet. patch(..., selecting_layers=PATH) takes it."
add(app, "selecting-layers", module.Options, module.run, getdoc(module), Path("selecting_layers.json"), OUT)
