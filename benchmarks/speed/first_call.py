"""Seconds of the first and the second generate() of a process: what compiling costs, and what kernel caches save.

Each row runs in a process of its own, which builds the model before the clock starts. "empty": the kernel caches of
Triton and inductor are empty. "kept": the caches hold what the process of the previous row left.
"""
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from torchsparsekv.method import Step
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import at_least, different, option
from torchsparsekv_benchmarks._progress import now
from torchsparsekv_benchmarks.speed import _common

CACHES = ("empty", "kept")
LONGER = 3  # times as many tokens, for the time of one


@dataclass(frozen=True)
class Options:
    shape: str = "llama-3.1-8b"
    context: int = option(32768, "Tokens of the prompt.")
    tokens: int = option(64, "Tokens of an answer.")
    methods: tuple[str, ...] = ("quest", "pariskv")
    step: tuple[str, ...] = option(("auto", "compiled"), "Values of patch(step=...), comma-separated.")
    caches: tuple[str, ...] = option(CACHES, "States of the kernel caches, comma-separated; the first must be empty.")

    @property
    def grows(self) -> int:
        return LONGER * self.tokens

    def check(self, methods: tuple[str, ...]) -> None:
        different(self, "methods", "step", "caches")
        at_least(self, tokens=2)
        for field, known in (("step", get_args(Step)), ("caches", CACHES)):
            if wrong := sorted(set(getattr(self, field)) - set(known)):
                raise ValueError(f"{field} must be of {', '.join(known)}, got {', '.join(wrong)}")
        if self.caches[0] != CACHES[0]:
            raise ValueError(f"the first of caches must be {CACHES[0]!r}, got {', '.join(self.caches)}")


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(o: Options, method: str, step: Step, device: str = "cuda") -> dict:
    """In the process of a row."""
    import torchsparsekv

    model = _common.build(o.shape, torch.device(device))
    ids = torch.randint(3, model.config.vocab_size, (1, o.context), device=model.device)

    def answer(tokens: int) -> float:
        told = dict(attention_mask=torch.ones_like(ids), min_new_tokens=tokens, max_new_tokens=tokens)
        return timed(lambda: model.generate(ids, do_sample=False, **told))

    with torchsparsekv.patch(model, method, max_length=o.context + o.grows, step=step):
        first, second, longer = (answer(n) for n in (o.tokens, o.tokens, o.grows))
        second = min(second, answer(o.tokens))
    return {"first_s": first, "second_s": second, "tpot_ms": (longer - second) / (o.grows - o.tokens) * 1e3}


def in_a_process(o: Options, method: str, step: str, folder: str) -> dict:
    """Whatever else it prints, its last line is the row."""
    told = json.dumps([dataclasses.asdict(o), method, step])
    caches = {f"{name}_CACHE_DIR": str(Path(folder) / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    command, env = [sys.executable, "-m", __name__, told], {**os.environ, **caches}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def run(o: Options, out: Path | None = None) -> dict:
    o.check(o.methods)
    _common.prepare(o.methods, o)
    rows: list[dict] = []
    for method in o.methods:
        for step in o.step:
            with tempfile.TemporaryDirectory() as folder:
                for caches in o.caches:
                    now(f"{method}, {step}, caches {caches}")
                    row = {"method": method, "step": step, "context": o.context, "caches": caches}
                    rows.append(row | in_a_process(o, method, step, folder))
                    print(rows[-1], flush=True)
                    _results.save("first_call", rows, dataclasses.asdict(o), out)
    return _results.finish("first_call", rows, dataclasses.asdict(o), out)


if __name__ == "__main__":
    options, *row = json.loads(sys.argv[1])
    print(json.dumps(measure(Options(**options), *row)))
