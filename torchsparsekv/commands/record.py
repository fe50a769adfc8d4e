"""`torchsparsekv record`: record the blocks that methods select on a real model, for `bench decode --trace`."""
from inspect import getdoc
from pathlib import Path

from torchsparsekv.commands import app
from torchsparsekv.commands._options import add
from torchsparsekv_benchmarks.quality import trace

add(app, "record", trace.Options, trace.run, getdoc(trace), Path("trace.npz"), "File for the selections, .npz.")
