"""Time per output token of models with windows, experts and linear layers at 128K, and needles that generate() finds.

No checkpoint is needed. Models have random weights, and one layer of each gets a chain of needles (_planted.py).
generate() reads the prompt in chunks and has to find the needles. The compiled decode step has to find them too. That
step is then timed with the model's own queries. At a share --locality of the steps the input is the token of the
step before. The hit rate follows from these queries and random keys.

The floor is the same step with dense attention over 256 tokens. transformers' static cache cannot be the floor: it
counts the tokens of a sliding window in Python, so its step compiles again while the window fills.
"""
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import check_skip_layers
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import Setup, at_least, different, option
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common, decode
from torchsparsekv_benchmarks.speed._planted import Chain, plant

ANSWERS = 9  # the first is of the prompt, which is dense: it does not count
POSITIONS = 1 << 18  # the real ones of some end at 131072, where there would be none left for what is generated
QWEN = dict(max_position_embeddings=POSITIONS, hidden_size=2048, vocab_size=151936, norm_topk_prob=True)
# Real shapes; what is less than the real model has is said here.
SHAPES: dict[str, dict] = {
    "gemma3-12b": dict(
        model_type="gemma3_text", num_hidden_layers=48, hidden_size=3840, intermediate_size=15360,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
        vocab_size=262208, max_position_embeddings=POSITIONS, rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", num_hidden_layers=24, hidden_size=2880, intermediate_size=2880, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
        vocab_size=201088, max_position_embeddings=POSITIONS, rope_parameters={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_theta": 150000.0,
        },
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", num_hidden_layers=48, intermediate_size=6144, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **QWEN,
    ),
    "qwen3-next-12": dict(  # 12 of the 48 layers of the 80B; all its experts
        model_type="qwen3_next", num_hidden_layers=12, intermediate_size=5120, num_attention_heads=16,
        num_key_value_heads=2, head_dim=256, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, **QWEN,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options(Setup):
    shapes: tuple[str, ...] = option(tuple(SHAPES), "Shapes, comma-separated, one after the other.")
    context: int = 131072
    methods: tuple[str, ...] = option(("quest",), "Methods beside dense attention, comma-separated.")
    chunk: int = option(8192, "Prompt tokens in one forward.")
    experts: Literal["batched_mm", "grouped_mm"] = option(
        "batched_mm", "How the compiled step multiplies experts: batched_mm, as steps of generate() do, or grouped_mm."
    )
    locality: float = option(0.95, "Share of timed steps that get the token of the step before.")
    steps: int = 100
    floor: bool = option(True, "Also time a step over 256 tokens. Its compilation takes a third of the run.")

    @property
    def grows(self) -> int:
        """Tokens that a run adds to a context."""
        return 2 * ANSWERS + _common.AHEAD + decode.PASSES * self.steps + 8

    def check(self, methods) -> None:
        super().check(methods)
        different(self, "shapes", "methods")
        at_least(self, chunk=2)
        unknown = [name for name in self.shapes if name not in SHAPES]
        if unknown:
            raise ValueError(f"unknown shape {unknown[0]!r}; available: {', '.join(SHAPES)}")
        if "full" in methods:
            raise ValueError("methods must not name full, which is always measured")
        for name in self.shapes:
            check_skip_layers(self.skip_layers, SHAPES[name]["num_hidden_layers"])
        longest = min(SHAPES[name]["max_position_embeddings"] for name in self.shapes) - self.grows
        rings = [self.method(name).ring_plan for name in methods]
        near = max(self.sink, *(ring.window + ring.interval for ring in rings))
        shortest = 20 * (near + ANSWERS)  # needles are in the middle nine tenths
        if not shortest <= self.context <= longest:
            raise ValueError(
                f"context must be from {shortest} (else needles are sinks or in the window) to {longest}, "
                f"got {self.context}"
            )
        alone = [n for n in (decode.FLOOR_CONTEXT, self.context) if n % self.chunk == 1]
        if alone:
            raise ValueError(f"chunk {self.chunk} leaves a last chunk of one token of {alone[0]}; choose another")


class Fed(decode.Step):
    """The compiled step, fed tokens: those of the chain, then others, each as often as the locality says."""

    def __init__(self, model, cache, chain: Chain, locality: float):
        super().__init__(model, cache, 1)
        drawn, stays = chain.haystack(decode.BANK, seed=4), torch.Generator().manual_seed(5)
        turns = (torch.rand(decode.BANK, generator=stays) >= locality).cumsum(0)
        self.bank = drawn[turns % decode.BANK].to(model.device)
        self.chain = chain

    def __call__(self, i: int = 0):
        self.ids.copy_(self.bank[i % decode.BANK])
        return super().__call__()

    @torch.no_grad()
    def answers(self) -> list[int]:
        """What the chain's tokens are answered; the first of these calls compile and record, as a warm-up does."""
        said = []
        self.position.fill_(int(self.cache.get_seq_length()) - 1)
        for token in self.chain.asking[:-1]:
            self.ids.fill_(token)
            said.append(int(super().__call__().logits[0, -1].argmax()))
        return said


class FirstToken:
    """A streamer of generate() that looks at the clock when the first new token comes."""

    def __init__(self) -> None:
        self.begin, self.at = time.perf_counter(), [0.0]

    def put(self, tokens: Tensor) -> None:  # on the CPU, so that the device is done with them
        self.at.append(time.perf_counter() - self.begin)

    def end(self) -> None: ...

    @property
    def seconds(self) -> float:
        return self.at[2]  # after nothing, and the prompt


def ask(model, ids: Tensor, cache, chunk: int) -> tuple[list[int], float]:
    """The answers of stock generate(), and the seconds to the first. Not compiled, or chunks would be, too."""
    watch = FirstToken()
    said = model.generate(
        input_ids=ids.to(model.device), past_key_values=cache, max_new_tokens=ANSWERS, do_sample=False,
        prefill_chunk_size=chunk, disable_compile=True, streamer=watch,
    )  # fmt: skip
    return said[0, ids.shape[1] :].tolist(), watch.seconds


def right(said: list[int], chain: Chain) -> str:
    """How many answers of decode steps are those planted."""
    pairs = list(zip(said, chain.answers, strict=True))[1:]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)}"


def multiply_experts(model, how: str) -> None:
    """In all layers, where the model has experts."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation(how)


def run_method(model, chain: Chain, name: str, o: Options, context: int) -> dict:
    with torchsparsekv.patch(model, name, max_length=context + o.grows, **o.patch(name)) as handle:
        cache = handle.make_cache(1)
        ids = chain.prompt(context)
        now(f"{name} at {context} tokens: prompt")
        ask(model, ids[:, -2 * o.chunk :], cache, o.chunk)  # loads the kernels
        cache.reset()
        said, seconds = ask(model, ids, cache, o.chunk)
        now(f"{name} at {context} tokens: {right(said, chain)} needles; compiled step")
        multiply_experts(model, o.experts)
        step = Fed(model, cache, chain, o.locality)
        row = {"method": name, **o.told(name), "context": context, "found": right(said, chain)}
        row |= {"found_compiled": right(step.answers(), chain), "prompt_s": seconds}
        row |= decode.measured(step, handle, o.steps)
        multiply_experts(model, "grouped_mm")
        del cache, step
    decode.collect()
    return row


def measure(shape: str, o: Options, device: torch.device) -> Iterator[dict]:
    """The rows of a shape."""
    now(f"{shape}: weights")
    model = _common.build(shape, device, SHAPES)
    multiply_experts(model, "grouped_mm")  # of a prompt: the other way makes a copy of the weights for every token
    chain = plant(model, o.context + o.grows, ANSWERS)
    told = {"shape": shape, "weights_GiB": sum(p.nbytes for p in model.parameters()) / 2**30}
    floor = run_method(model, chain, "full", o, decode.FLOOR_CONTEXT) if o.floor else None
    if floor:
        yield told | floor | {"over_floor": 1.0}
    dense = run_method(model, chain, "full", o, o.context)
    methods = (run_method(model, chain, name, o, o.context) for name in o.methods)
    for row in decode.told_against(floor or dense, [dense], methods):
        yield told | {k: v for k, v in row.items() if floor or k != "over_floor"}


def run(o: Options, out: Path | None = None) -> dict:
    """Saved whenever a shape is done; called again, it goes on with the next, since ratios are of one run."""
    device, options = _common.prepare(o.methods, o), o.recorded(o.methods)
    rows = _results.begun("shapes", options, out)
    for shape in o.shapes:
        if shape in {r["shape"] for r in rows}:
            continue
        of_shape = []
        for row in measure(shape, o, device):
            of_shape.append(row)
            print(row, flush=True)
        rows += of_shape
        _results.save("shapes", rows, options, out)
        decode.collect()
    return _results.finish("shapes", rows, options, out)
