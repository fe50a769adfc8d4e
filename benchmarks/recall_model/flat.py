"""The training forward: all rows of a batch as one run of tokens.

Everything but attention works token by token, and every training step has the same number of tokens. So the code is
compiled once for all lengths of the curriculum. A recompile would cost ten to twenty seconds of a nine-minute run. The
modules are those of the Hugging Face model; `tests/benchmarks/test_recall_model.py` compares the results.
"""
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchsparsekv_benchmarks.recall_model.tasks import CODES

KINDS = len(CODES) + 1  # code 0: no answer


def before(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [tokens, heads, d] of a layer; x [tokens, hidden]."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    a = layer.self_attn
    h = layer.input_layernorm(x)
    shape = (len(x), -1, a.head_dim)
    v = a.v_proj(h).view(shape)
    q, k = a.q_norm(a.q_proj(h).view(shape)), a.k_norm(a.k_proj(h).view(shape))
    q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    return q.to(v.dtype), k.to(v.dtype), v


def after(layer: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    x = x + layer.self_attn.o_proj(attended)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def judge(model: nn.Module, x: Tensor, target: Tensor, code: Tensor, other: float) -> tuple[Tensor, Tensor]:
    """(loss, [3, KINDS] by kind of answer: tokens, those right, sum of their losses); target -1 is left out."""
    logits = model.lm_head(model.model.norm(x)).float()
    loss = F.cross_entropy(logits, target, ignore_index=-1, reduction="none")
    right = logits.detach().argmax(-1) == target
    kind = F.one_hot(code.long(), KINDS).float() * (target >= 0)[:, None]
    seen = torch.stack([kind, kind * right[:, None], kind * loss.detach()[:, None]]).sum(1)  # no matmul: autocast
    answer = (code > 0).float()
    rest = (target >= 0).float() - answer
    wanted = (loss * answer).sum() / answer.sum().clamp(min=1)
    return wanted + other * (loss * rest).sum() / rest.sum().clamp(min=1), seen


@functools.lru_cache(maxsize=8)
def band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length]: what a query may see of the last `window` tokens and the first one."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at
    return (back >= 0) & ((back < window) | (at == 0))


def attend(q: Tensor, k: Tensor, v: Tensor, rows: int, window: int) -> Tensor:
    """Causal attention within each row, to the last `window` tokens only where that is not 0."""
    tokens = len(q)
    q, k, v = (t.view(rows, tokens // rows, t.shape[1], t.shape[2]).transpose(1, 2) for t in (q, k, v))
    if window:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=band(tokens // rows, window, q.device))
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(tokens, -1)


class Flat:
    """forward(ids [rows, length], codes) of a model; windows: layer -> how far back it sees, everything if absent."""

    def __init__(self, model, *, compiled: bool):
        self.model = model
        wrap = functools.partial(torch.compile, dynamic=False, fullgraph=True) if compiled else lambda f: f
        self.before, self.after, self.judge = wrap(before), wrap(after), wrap(judge)
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def rotary(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        if (rows, length) not in self.tables:
            at = torch.arange(length, device=self.model.device)[None]
            cos, sin = self.model.model.rotary_emb(torch.empty(1, device=self.model.device), at)
            self.tables[rows, length] = cos[0].repeat(rows, 1), sin[0].repeat(rows, 1)
        return self.tables[rows, length]

    def hidden(self, ids: Tensor, windows: dict[int, int]) -> Tensor:
        """[tokens, hidden] before the last norm."""
        cos, sin = self.rotary(*ids.shape)
        x = self.model.model.embed_tokens(ids.flatten())
        for i, layer in enumerate(self.model.model.layers):
            q, k, v = self.before(layer, x, cos, sin)
            x = self.after(layer, x, attend(q, k, v, len(ids), windows.get(i, 0)))
        return x

    def __call__(self, ids: Tensor, codes: Tensor, other: float, windows: dict[int, int]) -> tuple[Tensor, Tensor]:
        target = F.pad(ids[:, 1:], (0, 1), value=-1).flatten()
        return self.judge(self.model, self.hidden(ids, windows), target, F.pad(codes[:, 1:], (0, 1)).flatten(), other)
