"""One rank of `bench parallel` on a CPU: `torchrun parallel_ranks.py`; see test_parallel.py. Rank 0 prints all.

Time is not measured here: the steps run as they are, and a GPU's clock and counters are stood in for.
"""
import json

import torch
import torch.distributed as dist

from torchsparsekv_benchmarks.speed import _common, decode, parallel

OPTIONS = parallel.Options(
    shape="tiny", contexts=(512,), methods=("quest",), steps=2, dense=(), budget=64, sink=16, window=32,
    offload="device",
)  # fmt: skip
ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"}  # cut by rows; these by columns:
COLUMNS = {"o_proj", "down_proj"}


def take_share(mine, whole, rank: int, count: int) -> None:
    """The weights that this rank has of a whole model."""
    found = dict(whole.named_parameters())
    for name, own in mine.named_parameters():
        kind, given = name.split(".")[-2], found[name]
        if kind in ROWS | COLUMNS:
            given = given.chunk(count, 0 if kind in ROWS else 1)[rank]
        own.data.copy_(given)


@torch.no_grad()
def share_error(rank: int, count: int) -> dict:
    """How far the answers of all shares are from those of the whole, as they are and compiled."""
    device = torch.device("cpu")
    whole = _common.build("tiny", device).float()
    mine = parallel.build("tiny", count, device, torch.float32)
    for model in (whole, mine):  # two layers, since a compiler takes its time for each
        del model.model.layers[2:]
        model.config.num_hidden_layers = 2
    take_share(mine, whole, rank, count)
    ids = torch.randint(3, 900, (2, 50), generator=torch.Generator().manual_seed(1))
    want = whole(ids).logits
    compiled = torch.compile(mine.forward, fullgraph=True, backend="aot_eager")
    return {
        "heads": mine.config.num_key_value_heads,
        "plain": float((mine(ids).logits - want).abs().max()),
        "compiled": float((compiled(ids).logits - want).abs().max()),
    }


def rows() -> list[dict]:
    def time_loop(step, steps, repeats=3):
        for i in range(steps * repeats):
            step(i)
        return 1.0 + dist.get_rank()

    _common.time_each = lambda step, steps: [1.0] * steps
    _common.time_loop, torch.compile, decode.collect = time_loop, lambda f, **_: f, lambda: None
    for name in ("synchronize", "reset_peak_memory_stats", "set_sync_debug_mode"):
        setattr(torch.cuda, name, lambda *_: None)
    model = parallel.build("tiny", dist.get_world_size(), torch.device("cpu"))
    return list(parallel.rows_of(model, 1, OPTIONS))


if __name__ == "__main__":
    with parallel.ranks() as (rank, count):
        found = {"share": share_error(rank, count)}
        found["logits"] = parallel.logits_error(torch.device("cpu"), ("quest", "louiskv"))
        found["rows"] = rows()
        if rank == 0:
            print("FOUND", json.dumps(found))
