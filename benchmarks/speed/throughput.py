"""Throughput at one context, with the largest batch that fits in a cap on GPU memory."""
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchsparsekv
from torchsparsekv import host
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import Rows, Setup, at_least, option, pool_told
from torchsparsekv_benchmarks.speed import _common, _dense
from torchsparsekv_benchmarks.speed.decode import Options as DecodeOptions
from torchsparsekv_benchmarks.speed.decode import collect, run_method, run_static

SPARE_GIB = 1.5  # activations, the graph's own pool, the context of the driver
HOST_SHARE = 0.9  # of the free host memory, for pools: they are pinned, and must leave room for all else


@dataclass(frozen=True)
class Options(Rows):
    shape: str = "llama-3.1-8b"
    context: int = 32768
    caps_gib: tuple[float, ...] = option((48.0, 24.0), "Caps on GPU memory in GiB, weights included, comma-separated.")
    host_gib: float = option(0.0, "GiB of host memory for all pools; 0: all free host memory.")
    most: int = option(512, "The largest batch to try.")
    steps: int = 50
    dense: tuple[str, ...] = option((), f"Other dense attention: any of {', '.join(_dense.KERNELS)}.")
    dense_int8: bool = option(False, "Also measure our dense attention over a pool in 8 bits.")

    @property
    def decode(self) -> DecodeOptions:
        """Each cell is a run of that benchmark."""
        shared = {f.name for f in dataclasses.fields(self)} & {f.name for f in dataclasses.fields(DecodeOptions)}
        return DecodeOptions(contexts=(self.context,), **{name: getattr(self, name) for name in shared})

    @property
    def grows(self) -> int:
        return self.decode.grows

    def check(self, methods: Sequence[str]) -> None:
        self.decode.check(methods)
        at_least(self, most=1)
        if min(self.caps_gib, default=0) <= 0:
            raise ValueError(f"caps_gib must be positive, got {','.join(map(str, self.caps_gib)) or 'none'}")
        if self.host_gib < 0:
            raise ValueError(f"host_gib must not be negative, got {self.host_gib}")


@dataclass(frozen=True)
class _Packed(DecodeOptions):
    """The decode step of a cell whose pool is in 8 bits, also with dense attention."""

    def patch(self, name: str) -> dict[str, Any]:
        return super().patch(name) | pool_told("int8")


def largest_batch(model, name: str, length: int, cap: float, setup: Setup, host_gib: float = 0) -> int:
    """From the plan alone: how many rows fit into the cap, in GiB of GPU memory, and into host memory."""
    from torchsparsekv.patches import _memory

    with torchsparsekv.patch(model, name, max_length=length, **setup.patch(name)) as handle:
        plan, on_host = handle.planned, handle.offload == "host"
    device = cap * 2**30 - _memory.weight_bytes(model) - SPARE_GIB * 2**30
    room = HOST_SHARE * min(host.available(), host_gib * 2**30 or float("inf"))
    return _memory.largest_batch(plan, length, on_host=on_host, device_bytes=device, host_bytes=room)


def runs(model, cap: float, o: Options) -> Iterator[dict]:
    """Ours first, then dense attention of others at the same batch, then the methods, and dense attention in 8 bits; 0
    rows where not one fits."""
    packed = [("full", _Packed(**vars(o.decode)))] if o.dense_int8 else []
    for name, own in (("full", o.decode), *o.decode.asked(), *packed):
        pool = {"pool": "int8"} if isinstance(own, _Packed) else {}
        batch = min(o.most, largest_batch(model, name, o.context + o.grows, cap, own, o.host_gib))
        if batch < 1:
            yield {"method": name, **own.told(name), **pool, "batch": 0}
            continue
        yield run_method(model, name, own, batch, o.context) | pool
        if name == "full" and not pool:
            yield from (run_static(model, batch, o.context, own, kernel) for kernel in o.dense)


def run(o: Options, out: Path | None = None) -> dict:
    device, options = _common.prepare(o.methods, o), o.recorded(o.methods) | {"host_share": HOST_SHARE}
    _dense.try_out(o.dense, device)
    model = _common.build(o.shape, device)
    total = torch.cuda.get_device_properties(device).total_memory
    rows: list[dict] = []
    for cap in o.caps_gib:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 2**30 / total))
        best = 0.0
        for row in runs(model, cap, o):
            row = {"cap_GiB": cap, **row}
            if row["batch"]:
                row["tokens_per_s"] = row["batch"] / row["tpot_ms"] * 1e3
                if row["method"] in ("full", *o.dense) and "pool" not in row:
                    best = max(best, row["tokens_per_s"])
                row["over_dense"] = row["tokens_per_s"] / best if best else float("nan")
            print(row, flush=True)
            rows.append(row)
            _results.save("throughput", rows, options, out)
            collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    return _results.finish("throughput", rows, options, out)
