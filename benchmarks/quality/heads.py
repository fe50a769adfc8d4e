"""Queries and keys of a real model's attention layers over a text, by one dense forward: what methods are measured on.

Taken where transformers hands them to attention, so rotary positions and norms of heads are in them.
"""
import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.quality import texts
from torchsparsekv_benchmarks.quality.options import RECALL
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.recall_model import journal, vocabulary

NAME = "torchsparsekv_heads"
NOT_SHOWN = ("by_layer", "layers", "model")  # of a row, where it is printed
Rows = Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
GUESS = torch.zeros(0)  # a mask that says that attention itself is not asked for


@dataclass(frozen=True, eq=False)
class Heads:
    """Of some layers of a model over one text; layers are stacked as rows of a batch.

    queries [layers, query heads, tokens, dim] and keys [layers, kv heads, tokens, dim] in float32. `below`, where asked
    for, are the queries that a layer would have by what the layer below it was given.
    """

    queries: Tensor = field(repr=False)
    keys: Tensor = field(repr=False)
    scale: float
    layers: tuple[int, ...]
    below: Tensor | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.keys.shape[1]

    def weights(self, at: int) -> Tensor:
        """Of the query of token `at` on all that it sees: [layers, query heads, tokens]."""
        keys = self.keys[:, :, : at + 1]
        q = self.queries[:, :, at].unflatten(1, (keys.shape[1], -1))
        return (q @ keys.transpose(-1, -2) * self.scale).softmax(-1).flatten(1, 2)


@contextlib.contextmanager
def attending(model: Any, attend: Callable[..., Any]) -> Iterator[None]:
    """The model's attention by `attend(sdpa, module, q, k, v, mask, **more)`. It must be one whose attention
    transformers dispatches by name, as of all it has now."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, functools.partial(attend, AttentionInterface()["sdpa"]))
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def heads_of(model: Any, ids: Tensor, layers: Sequence[int], *, below: bool = False) -> Heads:
    """`ids` [tokens]."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    guessed: dict[int, Tensor] = {}
    scales: set[float] = set()

    def taking(sdpa, module, q, k, v, mask, **more):
        if mask is GUESS:
            guessed[module.layer_idx] = q[0].float()
            return torch.zeros_like(q).transpose(1, 2), None
        if module.layer_idx in layers:
            found[module.layer_idx] = q[0].float(), k[0].float()
            scales.add(float(more.get("scaling") or q.shape[-1] ** -0.5))
        return sdpa(module, q, k, v, mask, **more)

    hooks = _asked_ahead(model, layers) if below else []
    try:
        with attending(model, taking):
            model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    (scale,) = scales
    q, k = (torch.stack([found[i][j] for i in layers]).cpu() for j in (0, 1))
    return Heads(q, k, scale, tuple(layers), torch.stack([guessed[i] for i in layers]).cpu() if below else None)


def _asked_ahead(model: Any, layers: Sequence[int]) -> list[Any]:
    """Hooks by which each of the layers first asks by what the layer below it was given; GUESS is then its mask."""
    if 0 in layers:
        raise ValueError("there is no layer below the first one")
    given: list[Tensor] = []

    def ask(layer, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if layer.self_attn.layer_idx in layers:
            ahead = layer.input_layernorm(given[-1])
            layer.self_attn(ahead, position_embeddings=kwargs["position_embeddings"], attention_mask=GUESS)
        given[:] = [hidden]

    return [x.register_forward_pre_hook(ask, with_kwargs=True) for x in model.get_decoder().layers]


@dataclass(eq=False)
class Recorded:
    """One layer of a model over a text, in the shape of the synthetic ones of _recall.py: keys [heads, total, d] and
    queries [n, heads * group, d]."""

    keys: Tensor
    queries: Tensor
    g: torch.Generator
    taken: int = field(default=0, init=False)

    @property
    def heads(self) -> int:
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.heads

    @property
    def total(self) -> int:
        return self.keys.shape[1]

    @property
    def d(self) -> int:
        return self.keys.shape[2]

    def query(self, end: int) -> Tensor:
        """The next one, from the first on again when all were given."""
        self.taken += 1
        return self.queries[(self.taken - 1) % len(self.queries)]


def recorded(model: Any, ids: Tensor, asking: int = 0, seed: int = 0) -> list[Recorded]:
    """Every layer. The last `asking` tokens give queries only; 0: all tokens give both."""
    heads = heads_of(model, ids, range(model.config.get_text_config(decoder=True).num_hidden_layers))
    known, found = heads.tokens - asking, []
    for keys, queries in zip(heads.keys, heads.queries.transpose(1, 2)):
        asked = queries[known:] if asking else queries
        found.append(Recorded(keys[:, :known], asked, torch.Generator().manual_seed(seed)))
    return found


def written(length: int, index: int = 0) -> Tensor:
    """A whole journal of the recall model (recall_model/journal.py), every answer true: values and text are drawn by
    the number of the sample, for in teacher-forcing nobody writes them."""
    g = torch.Generator().manual_seed(index)
    prompt = journal.journal(length, index).prompt
    page = journal.journal(length - len(prompt), index)
    ids = torch.from_numpy(page.plan.copy())
    for kind, words in ((journal.ANY_VALUE, vocabulary.VALUES), (journal.ANY_TEXT, vocabulary.TEXT)):
        wanted = ids == kind
        known = torch.as_tensor(words)
        ids[wanted] = known[torch.randint(len(known), (int(wanted.sum()),), generator=g)].to(ids.dtype)
    for said, asked in zip(page.said.tolist(), page.asked.tolist()):
        span = int((ids[asked:] == journal.LIKELIEST).long().cumprod(0).sum())
        ids[asked : asked + span] = ids[said : said + span]
    return torch.cat([torch.tensor(page.prompt), ids])


@torch.no_grad()
def continued(model: Any, ids: Tensor, tokens: int, steered: Sequence[Any] = ()) -> Tensor:
    """`ids`, and as many tokens of the model's own, sampled; `steered`: logits processors."""
    torch.manual_seed(0)
    given = ids[None].to(model.device)
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True,
        temperature=1.0, top_p=None, top_k=None, logits_processor=[*steered],
    )  # fmt: skip
    return out[0].cpu()


def parser(doc: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=RECALL, help="recall, smollm2, or a Hugging Face path or name")
    p.add_argument("--text", default="moby-dick", help="what other models than recall read")
    p.add_argument("--length", type=int, default=8192, help="tokens")
    p.add_argument("--own", type=int, default=0, help="of these, the last ones that the model writes itself")
    p.add_argument("--skip-layers", type=int, default=2)
    p.add_argument("--layer-stride", type=int, default=1, help="3: every third layer after those")
    p.add_argument("--keep", type=Path, help="a file for what was computed, read next time")
    p.add_argument("--sink", type=int, default=32)
    p.add_argument("--window", type=int, default=64)
    p.add_argument("--out", type=Path)
    return p


def stepwise(doc: str | None, budgets: Sequence[int]) -> argparse.ArgumentParser:
    """For what is measured of a method's steps after a prompt."""
    p = parser(doc)
    p.add_argument("--method", default="quest")
    p.add_argument("--prompt", type=int, default=7936)
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--settle", type=int, default=30)
    p.add_argument("--budgets", type=int, nargs="+", default=list(budgets))
    return p


def shown(rows: Rows) -> Rows:
    """Every row is printed as it comes: they take minutes."""

    @functools.wraps(rows)
    def printing(o: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for row in rows(o):
            print({k: v for k, v in row.items() if k not in NOT_SHOWN}, flush=True)
            yield row

    return printing


def run(name: str, rows: Rows, p: argparse.ArgumentParser) -> None:
    """What the command line asks for, printed and saved."""
    o = p.parse_args()
    given = {k: v for k, v in vars(o).items() if k not in ("out", "keep")}
    _results.finish(name, list(rows(o)), given, o.out)


def read(o: argparse.Namespace, *, below: bool = False) -> Heads:
    """What these options ask for, in float32 on the CPU. Kept queries are halves."""
    about = {name: getattr(o, name) for name in ("model", "text", "length", "own", "skip_layers")}
    if o.keep is None:
        return _computed(o, o.layer_stride, below=below)
    if below:
        raise ValueError(f"queries by the layer below are not kept: --keep {o.keep} is not for this")
    if not o.keep.is_file():
        every = _computed(o, 1)
        torch.save((about, every.queries.half(), every.keys, every.scale, every.layers), o.keep)
    of, queries, keys, scale, layers = torch.load(o.keep)
    if of != about:
        raise ValueError(f"{o.keep} was made with {of}, this is {about}: name another file")
    wanted = slice(None, None, o.layer_stride)
    return Heads(queries[wanted].float(), keys[wanted], scale, layers[wanted])


def _computed(o: argparse.Namespace, stride: int, *, below: bool = False) -> Heads:
    if o.model == RECALL:
        from torchsparsekv_benchmarks.recall_model.model import load

        net, _ = load(dtype=torch.float32)
        ids = written(o.length)
    else:
        tokenizer, net = pretrained(o.model, torch.device("cpu"), torch.float32)
        ids = texts.read_one(o.text, tokenizer).ids[: o.length - o.own]
    if o.own:
        ids = continued(net, ids, o.own)
    layers = range(o.skip_layers, net.config.get_text_config(decoder=True).num_hidden_layers, stride)
    return heads_of(net, ids, layers, below=below)
