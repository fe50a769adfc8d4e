"""What attention to what was chosen takes, for tests/cases.py."""
from collections.abc import Callable

import torch
from world import World

from torchsparsekv.ops.store.views import Hot, Store


def sparse_attention(w: World, reach: Callable, attention: Callable) -> tuple:
    rows = w.truth.unflatten(2, (-1, w.block)).contiguous()
    each = torch.arange(w.blocks, dtype=torch.int32).expand(w.batch, w.heads, -1).contiguous()
    none, chosen = torch.zeros(w.batch, w.heads, dtype=torch.int32), w.chosen(max(1, w.blocks // 3))
    hot = Hot(rows, each, each.clone(), torch.zeros_like(each), none, chosen)  # a block is in its own slot
    near, reach = reach(w)
    return (w.q[:, :, :1], near, hot, w.lengths_view, reach, attention(w))


def fetch_and_attend(w: World, fetch: tuple, reach: Callable, attention: Callable) -> tuple:
    """What is chosen may be any block, as may what the hot buffer holds."""
    asked, far, hot, stats = fetch
    held = hot.block_of.gather(2, hot.chosen.clamp(min=0).long()) >= 0  # what a head keeps is there
    hot = hot._replace(chosen=torch.where(held, hot.chosen, -1))
    near, reach = reach(w)
    return (w.q[:, :, :1], asked, Store(*near, *far), hot, stats, w.lengths_view, reach, attention(w))
