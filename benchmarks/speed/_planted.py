"""A chain of needles written into random weights, so that recall can be measured without a checkpoint.

The last token of the prompt asks for needle 1, the answer to that asks for needle 2, and so on. One layer knows the
needles: the query of an asking token is the key of its needle, and the value of the needle is the direction of the
answer. All other layers compute as usual, but add nothing to the hidden states. Haystack tokens keep random keys.
"""
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_TOKEN = 3  # before it are padding and the ends of texts
SHARPNESS = 28.0  # logit of a needle; of 131072 random keys, of std 28 / sqrt(head_dim), the weights sum to far less
MOST_TURN = 0.5  # radians by which a rotation may turn a channel from the first to the last position
CHANNELS = 16  # in which keys of needles lie, at most: in more, peaks of random keys add up to theirs
LOUDNESS = 8.0  # the answer over the token that asked, in what flows through the model
ADDERS = ("o_proj", "out_proj", "down_proj", "down_proj_bias")  # what adds to that, in all of these models


@dataclass(frozen=True)
class Chain:
    """Which tokens ask, are found and answer."""

    asking: tuple[int, ...]  # the first is in the prompt, those after it are the answers
    needles: tuple[int, ...]
    vocabulary: int

    @property
    def answers(self) -> list[int]:
        return list(self.asking[1:])

    def depths(self, context: int) -> list[int]:
        """Where the needles are, in the order in which they are asked for: not that of the text."""
        n = len(self.needles)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).tolist()
        return [int(context * (0.05 + 0.9 * i / max(1, n - 1))) for i in order]

    def haystack(self, tokens: int, seed: int = 2) -> Tensor:
        """Random tokens that are none of the chain."""
        first = FIRST_TOKEN + len(self.asking) + len(self.needles)
        return torch.randint(first, self.vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))

    def prompt(self, context: int) -> Tensor:
        """[1, context]"""
        ids = self.haystack(context)
        ids[self.depths(context)] = torch.tensor(self.needles)
        ids[-1] = self.asking[0]
        return ids[None]


@torch.no_grad()
def plant(model, length: int, answers: int) -> Chain:
    """Write a chain into a fresh model, to be found over `length` positions. Returns its tokens."""
    config, text = model.config, model.model
    asking = range(FIRST_TOKEN, FIRST_TOKEN + answers + 1)
    needles = range(asking.stop, asking.stop + answers)
    known = _directions(config.hidden_size, 2 * answers + 1, model.device)
    loudness = LOUDNESS * _embed(model, known)
    layer = text.layers[last_full_layer(config)]
    for name, parameter in model.named_parameters():
        if set(name.split(".")) & set(ADDERS) and parameter is not layer.self_attn.o_proj.weight:
            parameter.zero_()
    if hasattr(layer, "pre_feedforward_layernorm"):  # then attention is normalised before it is added
        layer.post_attention_layernorm.weight += loudness / math.sqrt(config.hidden_size) - 1
    _write_keys(layer.self_attn, text.rotary_emb, known, answers, length)
    _write_answers(layer.self_attn, known, answers, loudness)
    return Chain(tuple(asking), tuple(needles), config.vocab_size)


def last_full_layer(config) -> int:
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return max(i for i, kind in enumerate(types) if kind == "full_attention")


def _directions(dim: int, count: int, device, *batch: int) -> Tensor:
    """Random orthonormal rows, [*batch, count, dim]."""
    drawn = torch.randn(*batch, dim, count, generator=torch.Generator().manual_seed(3))
    return torch.linalg.qr(drawn)[0].transpose(-1, -2).contiguous().to(device)


def _embed(model, known: Tensor) -> float:
    """Give the tokens of the chain these directions, in embedding and head; how long they are in the model."""
    tokens = slice(FIRST_TOKEN, FIRST_TOKEN + len(known))
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        length, mine = table.weight[tokens].float().norm(dim=1).mean(), known.to(table.weight.dtype)
        table.weight -= table.weight @ mine.T @ mine  # or all the haystack would be a faint copy of every needle
        table.weight[tokens] = mine * length
    ids = torch.arange(tokens.start, tokens.stop, device=model.device)
    return float(model.get_input_embeddings()(ids).float().norm(dim=1).mean())


def still_channels(rotary: nn.Module, head_dim: int, length: int, device) -> tuple[Tensor, float]:
    """Channels of a head that no rotation turns far over `length` positions, and by how much it scales all it turns."""
    kind = "full_attention_" if hasattr(rotary, "full_attention_inv_freq") else ""
    turns = getattr(rotary, f"{kind}inv_freq").float() * length
    far = torch.zeros(head_dim, device=device)
    far[: 2 * len(turns)] = turns.repeat(2)  # a channel turns with the one half of them away
    still = far.argsort(stable=True)[:CHANNELS]
    return still[far[still] <= MOST_TURN], getattr(rotary, f"{kind}attention_scaling")


def _write_keys(attn: nn.Module, rotary: nn.Module, known: Tensor, answers: int, length: int) -> None:
    """Queries of those that ask and keys of needles are one vector a pair, in channels that hardly turn."""
    dim, heads = attn.head_dim, attn.k_proj.out_features // attn.head_dim
    still, scaled = still_channels(rotary, dim, length, known.device)
    if len(still) < answers:
        raise ValueError(f"{answers} needles over {length} positions need as many still channels, got {len(still)}")
    vectors = torch.zeros(heads, answers, dim, device=known.device)
    vectors[..., still] = _directions(len(still), answers, known.device, heads)
    long = math.sqrt(SHARPNESS / (attn.scaling * scaled**2))
    for norm in (getattr(attn, name, None) for name in ("q_norm", "k_norm")):
        if norm is not None:
            norm.weight += long / math.sqrt(dim) - 1
    _answer(attn.q_proj.weight, known, 0, (long * vectors).repeat_interleave(attn.num_key_value_groups, 0))
    _answer(attn.k_proj.weight, known, answers + 1, long * vectors)


def _write_answers(attn: nn.Module, known: Tensor, answers: int, loudness: float) -> None:
    """Values of needles, and what they add to what flows through the model."""
    dim, heads = attn.head_dim, attn.v_proj.out_features // attn.head_dim
    values = _directions(dim, answers, known.device, heads)
    _answer(attn.v_proj.weight, known, answers + 1, math.sqrt(dim) * values)
    q_heads = heads * attn.num_key_value_groups
    gate = 0.5 if attn.q_proj.out_features > q_heads * dim else 1.0  # a gate has 0 for those that ask
    read = values.repeat_interleave(attn.num_key_value_groups, 0).transpose(0, 1).flatten(1)
    out = known[1 : answers + 1].T @ read * (loudness / (gate * q_heads * math.sqrt(dim)))
    by_chance = attn.o_proj.weight.float()  # what other values add is as loud as a token, and in any direction
    attn.o_proj.weight.copy_(out + by_chance * (loudness / LOUDNESS / by_chance.norm()))


def _answer(weight: Tensor, known: Tensor, first: int, answers: Tensor) -> None:
    """Make a projection answer tokens of the chain from `first` on by these, [heads, tokens, dim], and the others of
    the chain by nothing; what it makes of all else stays."""
    heads, tokens, dim = answers.shape
    whole = weight.float() - weight.float() @ known.T @ known
    by_head = whole.view(heads, -1, whole.shape[1])[:, :dim]  # a head may have a gate behind it
    by_head += answers.transpose(1, 2) @ known[first : first + tokens] / math.sqrt(known.shape[1])
    weight.copy_(whole)
