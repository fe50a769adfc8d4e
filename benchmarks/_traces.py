"""Files of the blocks that methods selected on a real model, step by step. `torchsparsekv record` writes them."""
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def repeated(ids: np.ndarray) -> float:
    """Share of the chosen blocks that the same head chose at the step before."""
    same = total = 0
    for head in ids:
        for before, now_ in itertools.pairwise(head):
            new = now_[now_ >= 0]
            same, total = same + np.isin(new, before).sum(), total + len(new)
    return float(same / max(total, 1))


def write(out: Path, found: dict[str, np.ndarray], about: dict) -> None:
    """Ascending ids as differences, which compress to about a byte each; -1, for none, comes first."""
    packed: dict[str, Any] = {}
    for key, ids in found.items():
        steps = np.diff(ids + 1, axis=-1, prepend=0)
        packed[key] = steps.astype(np.uint16 if steps.max() < 1 << 16 else np.uint32)
    np.savez_compressed(out, about=np.array(json.dumps(about)), **packed)


def contents(path: Path) -> tuple[dict, list[tuple[str, int]]]:
    """How a file was recorded, and its methods with their budgets."""
    with np.load(path) as file:
        found = [k.split("=") for k in file.files if k != "about"]
        return json.loads(str(file["about"])), [(method, int(budget)) for method, budget in found]


def read(path: Path, method: str, budget: int) -> Tensor:
    """[heads, steps, chosen], int32"""
    with np.load(path) as file:
        name = f"{method}={budget}"
        if name not in file:
            has = ", ".join(k for k in file.files if k != "about")
            raise ValueError(f"{path.name} has no trace of {name}; it has: {has}")
        ids = file[name]
    return torch.from_numpy(ids.cumsum(-1, dtype=np.int64) - 1).to(torch.int32)
