"""Dense accuracy of a recall model: greedy answers by task and length, and which layers need distant tokens."""
from collections.abc import Sequence

import numpy as np
import torch

from torchsparsekv_benchmarks.recall_model import documents, flat, tasks

TOKENS = 1 << 20  # of a batch of prompts


@torch.inference_mode()
def greedy(model, task: str, length: int, samples: int) -> float:
    """Mean score of the first `samples` samples, decoded by stock generate()."""
    drawn = [tasks.sample(task, length, i) for i in range(samples)]
    scores: list[float] = []
    for some in (drawn[i : i + max(1, TOKENS // length)] for i in range(0, samples, max(1, TOKENS // length))):
        ids = torch.tensor([s.prompt for s in some], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=some[0].new_tokens, do_sample=False, pad_token_id=0
        )
        scores += [s.score(o) for s, o in zip(some, out[:, ids.shape[1] :].tolist())]
    return float(np.mean(scores))


def table(model, lengths: Sequence[int], samples: int) -> list[dict]:
    """A row for each task with its score at every length."""
    return [{"task": t, **{str(n): round(greedy(model, t, n, samples), 4) for n in lengths}} for t in tasks.TASKS]


@torch.no_grad()
def locality(model, length: int, rows: int, window: int) -> dict[str, dict[str, float]]:
    """Teacher-forced accuracy by kind of answer if layers see `window` tokens back: none, each one, the first two.

    Sparse methods leave the first two layers dense, so what those see at a distance must not matter.
    """
    ids, codes = (torch.from_numpy(a).to(model.device) for a in documents.batch(1, 0, length, rows))
    whole = flat.Flat(model, compiled=False)
    layers = range(len(model.model.layers))
    cases = {"all see everything": {}, **{f"layer {i} local": {i: window} for i in layers}}
    cases["layers 0 and 1 local"] = {0: window, 1: window}
    found = {}
    for name, windows in cases.items():
        _, seen = whole(ids.long(), codes, 0.0, windows)
        right = (seen[1] / seen[0].clamp(min=1)).tolist()
        found[name] = {kind: round(right[code], 4) for kind, code in tasks.CODES.items()}
    return found
