"""Time of the host for each token of generate(), without the model: the loop itself, and what a patch adds.

The forward of a small model returns at once, with the same logits each time. A row is in microseconds a token: the
time of a long answer minus the time of a short answer, divided by the difference of their tokens.
- dynamic and static: unpatched, with transformers' cache of that name. With a static cache generate() also makes masks.
- captured: patched, with all that a captured step does except its graph. It copies inputs and clones outputs.

No GPU is needed. On a GPU the loop also launches kernels of its own and waits for each token.
"""
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import torchsparsekv
from torchsparsekv.patches import _attention, _captured
from torchsparsekv.patches._names import NAME, cache_in
from torchsparsekv_benchmarks import _results

PROMPT, SHORT, TOKEN, REPEATS = 64, 100, 5, 5


@dataclass(frozen=True)
class Options:
    tokens: int = 1000


class Replayed(_captured.Step):
    """A step that is captured at once; its graph is empty."""

    def __init__(self, kind: tuple):
        super().__init__(kind)
        self.eager = 0

    def _recorded(self, model, forward):
        return SimpleNamespace(replay=lambda: None), forward(self.inputs)


def quick() -> Any:
    """A small model, whose forward returns at once, but for prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 17,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    logits = torch.nn.functional.one_hot(torch.tensor([[TOKEN]]), model.config.vocab_size).float()
    real = model.forward

    def forward(self, input_ids=None, **kwargs):
        if input_ids.shape[1] > 1:
            return real(input_ids=input_ids, **kwargs)
        return CausalLMOutputWithPast(logits=logits, **{NAME: cache_in(kwargs)})

    model.forward = MethodType(forward, model)
    return model


def per_token(model: Any, tokens: int, **asked: Any) -> float:
    ids = torch.full((1, PROMPT), TOKEN)
    given: dict[str, Any] = dict(attention_mask=torch.ones_like(ids), do_sample=False, **asked)

    def took(new: int) -> float:
        begin = time.perf_counter()
        out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, **given)
        assert out.shape[1] == PROMPT + new
        return time.perf_counter() - begin

    took(SHORT)
    short, long = (min(took(new) for _ in range(REPEATS)) for new in (SHORT, SHORT + tokens))
    return (long - short) / tokens * 1e6


def rows(tokens: int) -> Iterator[dict[str, Any]]:
    model = quick()
    yield {"cache": "dynamic", "us": per_token(model, tokens)}
    yield {"cache": "static", "us": per_token(model, tokens, cache_implementation="static", disable_compile=True)}
    with (
        torchsparsekv.patch(model, "quest", max_length=PROMPT + SHORT + tokens + 1),
        mock.patch.object(_captured, "Step", Replayed), mock.patch.object(_captured, "user_hooks", return_value=""),
        mock.patch.object(_attention, "_check_mask"),  # of one token a GPU's is not looked at
        mock.patch.object(type(model), "_valid_auto_compile_criteria", return_value=True),
        mock.patch.object(model, "get_compiled_call", MethodType(_captured.Steps, model)),
    ):
        yield {"cache": "captured", "us": per_token(model, tokens)}


def run(o: Options, out: Path | None = None) -> dict:
    if o.tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {o.tokens}")
    return _results.finish("host_loop", list(rows(o.tokens)), dataclasses.asdict(o), out)
