"""What the ops take that choose single tokens or chunks by codes, samples and landmarks, from a world."""
import math

import torch
from world import World, integers

from torchsparsekv.ops.magicpig.views import Sample, Signatures
from torchsparsekv.ops.pqcache.views import Codebook
from torchsparsekv.ops.shadowkv.views import Landmarks
from torchsparsekv.ops.store.views import Attention, HotBuffer, Leaving


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


# ---------------------------------------------------------------- hash tables


def _signatures(w: World) -> Signatures:
    """Codes of few bits, so that many are equal; the centre is of whole numbers."""
    codes = torch.randint(0, 4, (w.batch, w.heads, w.pick(5, 2, 9), w.rows), generator=w.g)
    return Signatures(codes.to(torch.int16), integers(torch.randn(w.batch, w.heads, w.dim, generator=w.g)))


def _sample(w: World, tables: int) -> Sample:
    asked = torch.randint(0, 4, (w.batch, w.heads * w.group, tables), generator=w.g).to(torch.int16)
    return Sample(asked, torch.randint(0, tables + 1, (w.batch, w.heads), generator=w.g, dtype=torch.int32))


def hash_keys(w: World):
    leaving = Leaving(*map(integers, _leaving(w)))
    return (leaving, _signatures(w), w.lengths_view, w.pick(2, 1, 15), w.seed)


def hash_prompt(w: World):
    leaving = Leaving(integers(w.k), integers(w.pool(w.start)))
    return (leaving, _signatures(w), w.lengths_view, w.pick(2, 1, 15), w.seed, True)


def find_collisions(w: World):
    signatures = _signatures(w)
    sample = _sample(w, signatures.codes.shape[2])
    return (integers(w.q[:, :, :1]), signatures, sample, w.lengths_view, 2, w.seed, 1 + w.seed % (w.rows + 2))


def sample_bias(w: World):
    signatures = _signatures(w)
    each = torch.arange(w.rows, dtype=torch.int32).expand(w.batch, w.heads, -1).contiguous()
    none, chosen = torch.zeros(w.batch, w.heads, dtype=torch.int32), w.chosen(max(1, w.blocks // 2))
    rows, used = w.truth[:, :, :, None].contiguous(), torch.zeros_like(each)
    hot = HotBuffer(rows, each, each.clone(), used, none, none.clone(), chosen)
    return (w.q[:, :, :1], hot, signatures, _sample(w, signatures.codes.shape[2]), w.pick(2, 1, 10))


# ---------------------------------------------------------------- landmarks


def _landmarks(w: World) -> Landmarks:
    lead = (w.batch, w.heads, w.blocks)
    cosines = torch.randint(-4, 5, lead, generator=w.g) / 4  # many ties
    keys = torch.randn(*lead, w.dim, generator=w.g).to(w.dtype)
    return Landmarks(keys, cosines, torch.randint(0, 2, lead, generator=w.g, dtype=torch.int32))


def keep_landmarks(w: World):
    return (_leaving(w), _landmarks(w), w.lengths_view, w.block)


def mark_outliers(w: World):
    return (_landmarks(w), w.lengths_view, w.block, w.pick(2, 0, 5))


def landmark_logits(w: World):
    return (w.q[:, :, :1], _landmarks(w), w.lengths_view, w.block, _attention(w))


OPS = {
    "softmax_scores": softmax_scores,
    "assign_codes": assign_codes,
    "learn_codebook": learn_codebook,
    "code_logits": code_logits,
    "hash_keys": hash_keys,
    "hash_prompt": hash_prompt,
    "find_collisions": find_collisions,
    "sample_bias": sample_bias,
    "keep_landmarks": keep_landmarks,
    "mark_outliers": mark_outliers,
    "landmark_logits": landmark_logits,
}
MANY_TOKENS = {"assign_codes", "learn_codebook", "hash_keys", "hash_prompt", "keep_landmarks", "mark_outliers"}
