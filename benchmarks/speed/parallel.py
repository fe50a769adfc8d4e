"""Time per output token over the ranks of torchrun, one GPU each, beside dense attention on the same GPUs.

Every rank has its share of a model with random weights: heads, inner channels of the MLP, and vocabulary, as in
transformers' tensor parallel plan for llama. An all-reduce follows attention and MLP. The whole step is one CUDA graph
on each rank. First, the logits of a small model over all ranks (`tp_plan="auto"`) are compared with its logits on one
rank.

torchrun --nproc-per-node 2 -m torchsparsekv.cli bench parallel --contexts 131072,524288 --out parallel.json
"""
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

import torchsparsekv
from torchsparsekv.patches._family import head_dim_of
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import option
from torchsparsekv_benchmarks.speed import _common, _dense, decode

OF_RANKS = ("host_GiB", "device_GiB", "peak_GiB")  # told for each rank; of the rest, what the slowest has
SUMMED = ("recompiles", "graph_skips")


@dataclass(frozen=True)
class Options(decode.Options):
    """Of `bench decode`, and whether logits are compared."""

    logits: bool = option(True, "Compare logits over all ranks with those of one rank, on a small model in fp32.")
    localities: tuple[float, ...] = option((), "No effect: a method is timed at one locality.")
    hf_static: bool = option(False, "No effect: the static cache of transformers runs on one rank.")
    ours: bool = option(True, "No effect: our dense attention is always timed.")


@contextlib.contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """(this rank, how many) of a torchrun; one where there is none."""
    if "LOCAL_RANK" not in os.environ:
        raise RuntimeError("this needs torchrun: torchrun --nproc-per-node 2 -m torchsparsekv.cli bench parallel")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- a rank's share


def share_of(shape: str, count: int) -> dict:
    """The config of the part of a model that each of `count` ranks has."""
    from transformers import AutoConfig

    fields = dict(_common.SHAPES[shape])
    if fields["model_type"] not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{shape}: only shapes of llama, qwen2 and qwen3 can be shared by ranks here")
    whole = AutoConfig.for_model(fields["model_type"], **{k: v for k, v in fields.items() if k != "model_type"})
    cut = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    odd = {name: getattr(whole, name) for name in cut if getattr(whole, name) % count}
    if odd:
        raise ValueError(f"{shape} cannot be shared by {count} ranks: {odd}")
    return {**fields, "head_dim": head_dim_of(whole), **{name: getattr(whole, name) // count for name in cut[:3]}}


def build(shape: str, count: int, device: torch.device, dtype: torch.dtype = torch.bfloat16):
    """This rank's share, with random weights made where they stay; its answers are those of all ranks together."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = share_of(shape, count)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(dist.get_rank())
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        model.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size // count, bias=False, dtype=dtype)
    if count > 1:
        join(model)
    return model


def join(model) -> None:
    """What every rank has of a sum is added up; what it has of the vocabulary is put side by side."""
    group = dist.group.WORLD
    add = lambda module, args, out: collectives.all_reduce(out, "sum", group)  # noqa: E731
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(add)
        layer.mlp.down_proj.register_forward_hook(add)
    model.lm_head.register_forward_hook(lambda module, args, out: _side_by_side(out, group))


def _side_by_side(part: Tensor, group) -> Tensor:
    """The last dimension of all ranks. Gathered along the first one: the compiler of torch 2.11 knows no other way."""
    parts = collectives.all_gather_tensor(part.unsqueeze(0), 0, group)
    return parts.movedim(0, -2).flatten(-2)


# ---------------------------------------------------------------- logits


def logits_error(device: torch.device, methods: tuple[str, ...]) -> dict[str, float]:
    """By method, the largest difference of logits over all ranks and of one, by tp_plan="auto", of a model in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        heads = 2 * dist.get_world_size()
        config = AutoConfig.for_model(
            "llama", num_hidden_layers=4, hidden_size=64 * heads, intermediate_size=256, num_attention_heads=2 * heads,
            num_key_value_heads=heads, head_dim=32, vocab_size=512, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(place[0])
    dist.barrier()
    where = {"device_map": device} if device.type == "cuda" else {}
    models = [
        AutoModelForCausalLM.from_pretrained(place[0], dtype=torch.float32, **told).eval()
        for told in (where, {"tp_plan": "auto"})
    ]
    return {name: _difference(models, name) for name in methods}


@torch.no_grad()
def _difference(models, method: str) -> float:
    """Over a prompt and steps that all see the same tokens; a method that can, decides for each kv head by itself."""
    ids = torch.randint(3, 500, (2, 300), generator=torch.Generator().manual_seed(1)).to(models[0].device)
    own: dict[str, Any] = {"per_head": True} if "per_head" in torchsparsekv.methods()[method] else {}
    found = []
    for model in models:
        with torchsparsekv.patch(model, method, max_length=512, budget=64, sink=16, window=32, **own) as handle:
            cache = handle.make_cache(2)
            steps = [model(ids[:, :280], past_key_values=cache).logits[:, -1]]
            steps += [model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(280, 300)]
            found.append(torch.stack(steps))
    return float((found[0] - found[1]).abs().max())


# ---------------------------------------------------------------- rows


def together(row: dict) -> dict:
    """The row of all ranks: the slowest one's time, every one's memory."""
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    out = {**max(rows, key=lambda r: r["tpot_ms"]), "ranks": len(rows)}
    for name in (n for n in OF_RANKS if n in row):
        out[name] = [r[name] for r in rows]
    return out | {name: sum(r[name] for r in rows) for name in SUMMED if name in row}


def measured(run, *args) -> dict:
    """A row by `run`, with the most that the device held meanwhile, weights included."""
    torch.cuda.reset_peak_memory_stats()
    row = run(*args)
    return together(row | {"peak_GiB": torch.cuda.max_memory_allocated() / 2**30})


def run(o: Options, out: Path | None = None) -> dict:
    with ranks() as (rank, count):
        _common.prepare(o.methods, o)
        device = torch.device("cuda", torch.cuda.current_device())
        _dense.try_out(o.dense, device)
        errors = logits_error(device, o.methods) if o.logits else {}
        model = build(o.shape, count, device)
        rows: list[dict] = []
        for row in (row for batch in o.batches for row in rows_of(model, batch, o)):
            rows.append(row | ({"logits_error": errors[row["method"]]} if row["method"] in errors else {}))
            if rank == 0:
                print(rows[-1], flush=True)
                _results.save("parallel", rows, dataclasses.asdict(o), out)
        return _results.finish("parallel", rows, dataclasses.asdict(o), out) if rank == 0 else {}


def rows_of(model, batch: int, o: Options) -> Iterator[dict]:
    """The step at 256 tokens, and for every context dense attention and the methods, each as soon as it is known."""
    floor = measured(decode.run_static, model, batch, decode.FLOOR_CONTEXT, o, *o.dense[:1])
    yield {**floor, "over_floor": 1.0}
    for context in o.contexts:
        dense = [measured(decode.run_static, model, batch, context, o, name) for name in o.dense]
        dense.append(measured(decode.run_method, model, "full", o, batch, context))
        methods = (measured(decode.run_method, model, name, own, batch, context) for name, own in o.asked())
        yield from decode.told_against(floor, dense, methods)
