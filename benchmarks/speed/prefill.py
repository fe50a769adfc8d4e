"""Time to the first token: the unpatched model (SDPA, DynamicCache) and patched models, in one run."""
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import Offload, make_method
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import changes, check_also, option, parse, said
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common


@dataclass(frozen=True)
class Options:
    shape: str = "llama-3.1-8b"
    contexts: tuple[int, ...] = option((32768, 65536), "Tokens of a prompt, comma-separated.")
    methods: tuple[str, ...] = ("quest", "arkvale")
    offload: Offload = "host"
    also: tuple[str, ...] = option(
        (), "Adds a row of the table for each METHOD.NAME=VALUE, comma-separated: METHOD with this value."
    )
    repeats: int = 3
    chunk: int = option(0, "Prompt tokens in one forward; 0: whole prompts.")

    @property
    def grows(self) -> int:
        """Tokens that the caches have room for beside the prompt."""
        return 64

    def asked(self) -> list[tuple[str, dict]]:
        """The methods in the order of their rows, and what is changed of each."""
        return [*((name, {}) for name in self.methods), *((n, parse([text])[n]) for n, text in changes(self.also))]


def prompt(model, rows: int, length: int) -> Tensor:
    return torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0)).to(model.device)


@torch.no_grad()
def time_prompt(model, ids: Tensor, cache, chunk: int = 0) -> float:
    """Milliseconds to the first token's logits."""

    def forward(_) -> None:
        for part in ids.split(chunk or ids.shape[1], 1):
            model(part, past_key_values=cache, logits_to_keep=1)

    return _common.time_loop(forward, 1, 1)


def time_prompts(model, length: int, new_cache, o: Options) -> tuple[float, float]:
    """(milliseconds to the first token's logits, peak GiB), the cache made beforehand; the first one loads kernels."""
    ids, times = prompt(model, 1, length), []
    for _ in range(o.repeats + 1):
        cache = new_cache()
        torch.cuda.reset_peak_memory_stats()
        times.append(time_prompt(model, ids, cache, o.chunk))
        del cache
    return statistics.median(times[1:]), torch.cuda.max_memory_allocated() / 2**30


def run(o: Options, out: Path | None = None) -> dict:
    from transformers import DynamicCache

    if o.chunk < 0:
        raise ValueError(f"chunk must not be negative, got {o.chunk}")
    check_also(o.also, o.methods)
    for name, hyper in o.asked():
        make_method(name, **hyper)
    device = _common.prepare(o.methods, o)
    model = _common.build(o.shape, device)
    rows = []
    for length in o.contexts:
        now(f"prompts of {length} tokens: dense, {', '.join(o.methods)}")
        dense, peak = time_prompts(model, length, lambda: DynamicCache(config=model.config), o)
        rows.append({"method": "dense", "context": length, "ttft_ms": dense, "over_dense": 1.0, "peak_GiB": peak})
        for name, hyper in o.asked():
            room = length + o.grows
            with torchsparsekv.patch(model, name, max_length=room, offload=o.offload, **hyper) as handle:
                cache = handle.make_cache(1)

                def fresh(cache=cache):
                    cache.reset()
                    return cache

                ms, peak = time_prompts(model, length, fresh, o)
                del cache, fresh
            row = {"method": name, "context": length, "ttft_ms": ms, "over_dense": ms / dense, "peak_GiB": peak}
            rows.append(row | said(hyper))
            torch.cuda.empty_cache()
            print(rows[-1], flush=True)
    return _results.finish("prefill", rows, dataclasses.asdict(o), out)
