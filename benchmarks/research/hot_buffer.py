"""What share of selected blocks does a hot buffer of a given size hold? On recorded selections of a real model.

    python benchmarks/research/hot_buffer.py --out benchmarks/results/quality/hot_buffer.json

A trace of `torchsparsekv record` has the blocks that eight kv heads selected, step by step. For each size the script
starts with an empty hot buffer and brings the blocks in, as `fetch` does. The first steps fill the buffer and are not
counted. Under a minute on a CPU, without a model.
"""
import argparse
import json
from pathlib import Path

from torch import Tensor

from torchsparsekv_benchmarks import _results, _traces

TRACES = Path("benchmarks/results/traces")
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
WARM_UP = 56


class Clock:
    """The hot buffer of one kv head, without its contents: `bring` of ops/gather/fetch.py on lists, a hundred times as
    fast. tests/benchmarks/test_hot_buffer.py compares the two."""

    def __init__(self, slots: int):
        self.slot_of: dict[int, int] = {}
        self.block_of, self.used, self.hand = [-1] * slots, [0] * slots, 0

    def select(self, ids: list[int]) -> int:
        """Bring these blocks. Returns the number of misses."""
        missing = [x for x in ids if x not in self.slot_of]
        hits = [self.slot_of[x] for x in ids if x in self.slot_of]
        taken: list[int] = []
        skipped, at = set(hits), self.hand
        while len(taken) < len(missing):
            if at not in skipped:
                if self.used[at]:
                    self.used[at] = 0
                else:
                    taken.append(at)
                    skipped.add(at)
            at = (at + 1) % len(self.used)
        self.hand = at
        for i in hits:
            self.used[i] = 1
        for x, i in zip(missing, taken):
            self.slot_of.pop(self.block_of[i], None)
            self.block_of[i], self.slot_of[x] = x, i
        return len(missing)


def hit_rate(ids: Tensor, slots: int, warm_up: int = WARM_UP) -> float:
    """ids [heads, steps, chosen], -1 for none: the share of the blocks of later steps that are in the buffer."""
    selected = missed = 0
    for head in ids.tolist():
        clock = Clock(slots)
        for t, step in enumerate(head):
            wanted = [x for x in step if x >= 0]
            misses = clock.select(wanted)
            if t >= warm_up:
                selected, missed = selected + len(wanted), missed + misses
    return 1 - missed / selected


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--traces", default="qwen_32k,qwen_120k")
    p.add_argument("--out", type=Path, required=True)
    o = p.parse_args()
    rows = []
    for trace in o.traces.split(","):
        path = TRACES / f"{trace}.npz"
        about, methods = _traces.contents(path)
        for method, budget in methods:
            ids = _traces.read(path, method, budget)
            for size in SIZES:
                rate = hit_rate(ids, size * ids.shape[2])
                rows.append({"trace": trace, "length": about["length"], "method": method, "budget": budget,
                             "hot_budgets": size, "hit_rate": round(rate, 4)})  # fmt: skip
                print(rows[-1], flush=True)
    options = {"traces": o.traces, "warm_up": WARM_UP, "model": about["model"], "text": about["text"]}
    o.out.write_text(json.dumps(_results.header("hot_buffer", options) | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
