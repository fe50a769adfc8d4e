"""ParisKV finds the tokens of largest attention weight among keys shaped like those of a model."""
import torch
from structured_keys import StructuredKeys, recalled
from torch import Tensor

from torchsparsekv._methods.pariskv import ParisKV
from torchsparsekv.ops.pariskv.centroid_votes import centroid_votes
from torchsparsekv.ops.pariskv.encode_keys import encode_keys
from torchsparsekv.ops.pariskv.rank_by_votes import candidates_of, rank_by_votes
from torchsparsekv.ops.pariskv.rerank import rerank
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.rows import keys_of, rows_of
from torchsparsekv.ops.store.views import Leaving, Lengths


def chosen(keys: Tensor, q: Tensor, group: str) -> Tensor:
    """Ids [heads, 100] that both stages of the search find; keys [heads, tokens, dim]."""
    method, n = ParisKV(sink=0, full_threshold=0, budget=100), keys.shape[1]
    lead, m = (1, *keys.shape[:2]), method.m
    pool = rows_of(keys, torch.zeros_like(keys))[None].contiguous()
    codes = Codes(
        ids=torch.zeros(*lead, keys.shape[2] // m, dtype=torch.uint8),
        codes=torch.zeros(*lead, keys.shape[2] // 2, dtype=torch.uint8),
        weights=torch.zeros(*lead, keys.shape[2] // m, dtype=torch.float16),
        counts=torch.zeros(1, keys.shape[0], keys.shape[2] // m, 1 << m, dtype=torch.int32),
    )  # fmt: skip
    at = lambda begin, end, step: Lengths._make(  # noqa: E731
        (*(torch.tensor([t], dtype=torch.int32) for t in (end, end, begin, end)), 0, step)
    )
    encode_keys(Leaving(keys_of(pool)[:, :, :1], pool), codes, at(0, n, n), m, method.seed)
    lengths = at(n, n, 1)
    rotated, votes = centroid_votes(q[None, :, None], codes, lengths, method.ratios, group == "mean", method.seed)
    some = rank_by_votes(votes, codes, lengths, method.ratios, 100, 0, n)
    some = some[..., : candidates_of(n, method.ratios, 100, 0)].contiguous()
    return top_blocks(rerank(rotated, codes, some), 100, some)[0].long()


def test_recall_on_structured_keys():
    """Against the exact top-100, at the shares the authors use for this length; the paper reports 0.64."""
    stream = StructuredKeys(8192, heads=2, group=2)
    found: dict[str, list[tuple[float, float, float]]] = {"mean": [], "max": []}
    for _ in range(6):
        q = stream.query()
        logits = stream.logits(q)
        mass, of_mean = logits.softmax(-1).mean(1), logits.mean(1).topk(100).indices
        top = mass.topk(100).indices
        for rule, rows in found.items():
            ids = chosen(stream.keys, q, rule)
            held = mass.gather(1, ids).sum(-1) / mass.gather(1, top).sum(-1)
            rows.append((recalled(top, ids, 8192), recalled(of_mean, ids, 8192), float(held.mean())))
    recall, recall_of_mean, held = ({rule: torch.tensor(x).mean(0)[i] for rule, x in found.items()} for i in range(3))
    assert recall_of_mean["mean"] >= 0.75
    assert recall["max"] >= 0.64
    assert held["max"] >= 0.85
