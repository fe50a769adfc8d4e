"""A llama whose weights are set by hand so that it can only answer by retrieval, and prompts for it.

The vocabulary has names, links and words. A link i>j says "after name i comes name j". The model reads a name, attends
to the link with that name on its left anywhere in the prompt, and says the name on its right; that name is the next
question. So one run of generate() follows a chain of links, and each step needs one token that can be anywhere.
Which links there are differs from prompt to prompt: nothing of the answer is in the weights.
"""
from itertools import pairwise

import torch
from torch import Tensor

PAD, NAMES, WORDS = 0, 64, 400
FIRST_NAME = 1
FIRST_WORD = FIRST_NAME + NAMES
FIRST_LINK = FIRST_WORD + WORDS
VOCABULARY = FIRST_LINK + NAMES * NAMES
HEAD_DIM, CODE = 64, 48
# What the channels of the residual stream mean: the code of the name asked for, the code of the name a link begins
# with, the name it leads to, the answer, and for words a meaning of their own.
ASKED, BEGINS, LEADS, ANSWER, MEANING = (slice(0, 48), slice(48, 96), slice(96, 160), slice(160, 224), slice(224, 256))
# The lowest frequencies of the rotary embedding, which at this base do not turn within any prompt we make.
ROPE_BASE = 1e30
STILL = torch.tensor([*range(8, 32), *range(40, 64)])


def link(i: int, j: int) -> int:
    return FIRST_LINK + i * NAMES + j


def random_model(max_length: int, seed: int = 0, **options):
    """A llama of 3 layers, 4 query heads on 2 kv heads, on the CPU in fp32, whose attention is flat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=HEAD_DIM, max_position_embeddings=max_length, pad_token_id=PAD,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False, initializer_range=0.1, **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = PAD
    return model


def chain_model(max_length: int, seed: int = 0):
    """The same shape with the weights that follow chains; the first layer adds nothing."""
    model = random_model(max_length, rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE})
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(_embeddings(torch.Generator().manual_seed(seed)))
        model.lm_head.weight.zero_()
        model.lm_head.weight[FIRST_NAME : FIRST_NAME + NAMES, ANSWER] = torch.eye(NAMES)
        for i, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight.zero_()
            _set_attention(layer.self_attn, answers=i > 0)
    return model


def _embeddings(g: torch.Generator) -> Tensor:
    codes = torch.randint(0, 2, (NAMES, CODE), generator=g) * 2.0 - 1
    e = torch.zeros(VOCABULARY, 256)
    e[FIRST_NAME : FIRST_NAME + NAMES, ASKED] = codes
    e[FIRST_WORD:FIRST_LINK, BEGINS] = 0.3 * torch.randn(WORDS, CODE, generator=g)  # words look a little like links
    e[FIRST_WORD:FIRST_LINK, MEANING] = torch.randn(WORDS, 32, generator=g)
    links = e[FIRST_LINK:].view(NAMES, NAMES, 256)
    links[:, :, BEGINS] = codes[:, None]
    links[:, :, LEADS] = torch.eye(NAMES)[None]
    return e


def _set_attention(attention, *, answers: bool) -> None:
    """Queries read ASKED, keys BEGINS, values LEADS; the output goes to ANSWER, an equal share from every head."""
    for projection, channels, to in (("q_proj", ASKED, STILL), ("k_proj", BEGINS, STILL), ("v_proj", LEADS, None)):
        w = getattr(attention, projection).weight
        w.zero_()
        per_head = w.view(-1, HEAD_DIM, 256)
        rows = torch.arange(HEAD_DIM) if to is None else to
        per_head[:, rows, torch.arange(channels.start, channels.stop)] = 1.0
    out = attention.o_proj.weight
    out.zero_()
    if answers:
        out[ANSWER] = torch.eye(HEAD_DIM).repeat(1, 4) / 4


def chain_prompts(lengths: list[int], steps: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and mask of a left-padded batch, and the names that follow: [rows, steps]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    answers = torch.empty(len(lengths), steps, dtype=torch.int64)
    for b, n in enumerate(lengths):
        names = torch.randperm(NAMES, generator=g).tolist()
        chain, others = names[: steps + 1], names[steps + 1 :]
        row = torch.randint(FIRST_WORD, FIRST_LINK, (n,), generator=g)
        told = [link(i, j) for i, j in pairwise(chain)]
        told += [link(i, chain[0]) for i in others]  # links that are not on the way
        row[torch.randperm(n - 1, generator=g)[: len(told)]] = torch.tensor(told)
        row[-1] = FIRST_NAME + chain[0]
        ids[b, -n:] = row
        answers[b] = FIRST_NAME + torch.tensor(chain[1:])
    return ids, (ids != PAD).long(), answers
