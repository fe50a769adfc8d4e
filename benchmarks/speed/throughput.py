"""Peak decode throughput at one context length when GPU memory is capped: what offloading buys is batch size."""
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

import torchsparsekv
from torchsparsekv import host
from torchsparsekv.benchmarks import _results
from torchsparsekv.benchmarks._options import Setup
from torchsparsekv.benchmarks.speed import _common
from torchsparsekv.benchmarks.speed.decode import Options as DecodeOptions
from torchsparsekv.benchmarks.speed.decode import collect, run_method

SPARE_GIB = 1.5  # activations, the graph's own pool, the context of the driver
HOST_SHARE = 0.85


@dataclass(frozen=True)
class Options:
    shape: str = "llama-3.1-8b"
    context: int = 32768
    caps_gib: tuple[float, ...] = (48.0, 24.0)
    methods: tuple[str, ...] = ("quest",)
    steps: int = 50
    skip_layers: int = 2
    locality: float = 0.95

    @property
    def decode(self) -> DecodeOptions:
        """Each cell is a run of that benchmark."""
        return DecodeOptions(steps=self.steps, locality=self.locality, skip_layers=self.skip_layers)

    @property
    def grows(self) -> int:
        return self.decode.grows


def largest_batch(model, name: str, length: int, cap: float, setup: Setup) -> int:
    """From the plan alone: how many rows fit into the cap, in GiB of GPU memory, and into host memory."""
    with torchsparsekv.patch(model, name, max_length=length, **setup.patch(name)) as handle:
        on_host, on_device = handle.plan.bytes(1, length, pool_on_host=handle.offload == "host")
    weights = sum(p.nbytes for p in model.parameters())
    fits = int((cap * 2**30 - weights - SPARE_GIB * 2**30) // on_device)
    return min(fits, int(HOST_SHARE * host.available() // on_host)) if on_host else fits


def run(o: Options, out: Path | None = None) -> dict:
    if min(o.caps_gib, default=0) <= 0:
        raise ValueError(f"caps_gib must be positive, got {','.join(map(str, o.caps_gib)) or 'none'}")
    device = _common.prepare(o.methods, o)
    model = _common.build(o.shape, device)
    total = torch.cuda.get_device_properties(device).total_memory
    d, rows = o.decode, []
    for cap in o.caps_gib:
        torch.cuda.set_per_process_memory_fraction(cap * 2**30 / total)
        dense = 0.0
        for name in ("full", *o.methods):
            batch = largest_batch(model, name, o.context + o.grows, cap, d)
            if batch < 1:
                rows.append({"cap_GiB": cap, "method": name, "batch": 0})
                continue
            row = {"cap_GiB": cap, **run_method(model, name, d, batch, o.context)}
            row["tokens_per_s"] = batch / row["tpot_ms"] * 1e3
            dense = row["tokens_per_s"] if name == "full" else dense
            row["over_dense"] = row["tokens_per_s"] / dense if dense else float("nan")
            print(row, flush=True)
            rows.append(row)
            collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    near = {name: getattr(d, name) for name in ("budget", "sink", "window")}
    return _results.finish("throughput", rows, dataclasses.asdict(o) | near, out)
