"""What the ops take that choose single tokens or chunks by codes, samples and landmarks, from a world."""
import math

import torch
from world import World

from torchsparsekv.ops.pqcache.views import Codebook
from torchsparsekv.ops.store.views import Attention, Leaving


def _leaving(w: World) -> Leaving:
    return Leaving(w.k, w.pool(torch.maximum(w.begin, w.length)))


def _attention(w: World) -> Attention:
    return Attention(w.dim**-0.5, w.pick(0.0, 5.0))


def softmax_scores(w: World):
    shape = (w.batch, w.heads * w.group, w.rows * w.pick(1, 40))  # for one program, or for several
    logits = 9 * torch.randn(shape, generator=w.g)
    for value, share in ((-math.inf, 0.3), (math.nan, 0.1), (math.inf, w.pick(0.0, 0.05))):
        logits[torch.rand(shape, generator=w.g) < share] = value
    return (logits, w.heads, w.pick(False, True))


# ---------------------------------------------------------------- product quantization


def _codebook(w: World) -> Codebook:
    spaces, most = w.pick(2, 1, 4), w.pick(4, 1, 20)
    lead = (w.batch, w.heads)
    centroids = torch.randn(*lead, spaces, most, w.dim // spaces, generator=w.g).to(w.dtype)
    codes = torch.randint(0, most, (*lead, w.rows, spaces), generator=w.g).to(torch.uint8)
    return Codebook(centroids, codes, torch.randint(0, 2, (w.batch,), generator=w.g, dtype=torch.int32))


def assign_codes(w: World):
    return (_leaving(w), _codebook(w), w.lengths_view)


def learn_codebook(w: World):
    spans = [*w.start.tolist(), *w.length.tolist()] if w.pick(True, False) else None
    leaving = Leaving(w.k, w.pool(w.start))
    return (leaving, _codebook(w), w.lengths_view, w.pick(1, 3), w.seed, spans, True)


def code_logits(w: World):
    return (w.q[:, :, :1], _codebook(w), w.lengths_view, _attention(w))


OPS = {
    "softmax_scores": softmax_scores,
    "assign_codes": assign_codes,
    "learn_codebook": learn_codebook,
    "code_logits": code_logits,
}
MANY_TOKENS = {"assign_codes", "learn_codebook"}
