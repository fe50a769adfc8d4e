"""What a step leaves to be fetched late, as the ops of cases.py have it."""
import torch
from world import World

from torchsparsekv.ops.store.rows import STATS
from torchsparsekv.ops.store.views import HotBuffer, Prefetch, Selection, Stats

I32 = torch.int32


def _prefetch(w: World, ids: torch.Tensor) -> Prefetch:
    """Queries of the step before that are like those of this one in some heads, and in some not."""
    lead, q = ids.shape[:2], w.q[:, :, 0]
    before = q.float() + torch.randn(q.shape, generator=w.g) * w.pick(0.0, 0.5, 2.0)
    before[torch.rand(q.shape[:2], generator=w.g) < 0.1] = 0
    seen = (w.length[:, None] - torch.randint(1, w.pick(2, 3), lead, generator=w.g)).to(I32)
    now, waits, frontier = (torch.randint(0, 2, lead, generator=w.g, dtype=I32) for _ in range(3))
    counts = torch.randint(0, 9, (*lead, len(STATS)), generator=w.g)
    return Prefetch(before.to(w.dtype), seen, now, 1 - now, frontier, waits, torch.full_like(ids, -1), counts)


def query_drift_gate(w: World):
    ids = w.chosen(w.pick(1, max(1, w.blocks // 3)))
    alike = w.pick(0.8, -1.0, 0.3, 0.5, 1.0)
    return (w.q[:, :, :1], ids, _prefetch(w, ids), w.stats(), w.lengths_view, alike, w.pick(False, True))


def prefetch_async(w: World, fetched: tuple[Selection, torch.Tensor, HotBuffer, Stats]):
    selection, pool, hot, _ = fetched
    prefetch = _prefetch(w, selection.ids)._replace(ids=selection.ids)
    return w.q[:, :, :1].clone(), prefetch, pool, hot, w.pick(True, False)
