"""A soak test in vLLM: random requests for half an hour, and what is lost, is wrong or grows.

    python tests/tools/mixed_load.py --minutes 30 --method pariskv --kv auto --out mixed_load.json

Requests go to AsyncLLM, the engine behind `vllm serve`. It runs the model in a process of its own. Requests arrive at
random times. A third of the prompts begin as an earlier prompt does, and a tenth of the requests are cancelled. The
cache is small, so vLLM preempts requests. Then some requests run again, one at a time, with an empty prefix cache.

Exits with 1 and a line for each kind of fault:
- a request fails, ends with another number of tokens than it asked for, or takes longer than LIMIT;
- at the end the engine has requests or occupied blocks;
- memory grows after the first third of the samples: by 1 % on the device, or by 5 % and 64 MiB in a process;
- in float32 a request has other tokens when it runs again, and the first of them is less probable by more than TIE.
  After a preemption vLLM computes tokens anew as a prompt, which attends to everything. So only tokens before the first
  preemption count, unless --budget holds all tokens.
"""
import argparse
import asyncio
import itertools
import json
import math
import os
import random
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import torch
from long_run import resident_mib
from vllm_serving import GPU, NATIVE, tiny_llama

if GPU:
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
else:
    import vllm_cpu  # noqa: F401

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats

from torchsparsekv.engines._vllm_seams import seam
from torchsparsekv_benchmarks import _results

BLOCK, LEAST_NEW, MOST_NEW = 16, 16, 256
LIMIT, MOST = 600, 48  # seconds of a request; requests at a time: while there are so many, no more arrive
TIE = 0.1  # of log probabilities. Rounding can exchange two tokens of a selection that are as good as each other
GROWS = {"allocated": (0.01, 0), "reserved": (0.01, 0), "engine": (0.05, 64), "client": (0.05, 64)}  # share, and MiB
OPTIONS: dict = {
    "minutes": (30.0, "how long requests arrive"),
    "method": ("quest", "quest, arkvale, pagemean or pariskv"),
    "kv": ("device", "device, host or auto"),
    "budget": (512, "tokens that a step selects"),
    "options": ("{}", "more options of the plugin, as JSON"),
    "model": ("", "a folder; without it a tiny llama with random weights, in float32"),
    "vllm": ("{}", "more options of vLLM's engine, as JSON"),
    "blocks": (0, "blocks of the cache; 0: as many as two of the longest requests need"),
    "rate": (4.0, "requests that arrive in a second"),
    "shortest": (1024, "tokens of a prompt"),
    "longest": (65536, "tokens of a prompt"),
    "again": (32, "requests that run again, one at a time"),
    "seed": (0, "of the requests"),
    "out": ("", "a JSON file for the result"),
}


class Watch:
    """What vLLM adds to its workers (worker_extension_cls)."""

    def memory_used(self) -> dict[str, float]:
        """MiB of the device, and of the process of the engine."""
        on_device = torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20
        return {"engine": resident_mib()} | (dict(zip(("allocated", "reserved"), on_device)) if GPU else {})


class Counts(StatLoggerBase):
    """Counters of the scheduler, and how many tokens each request had when it was first preempted."""

    def __init__(self):
        self.running = self.waiting = 0
        self.total: Counter[str] = Counter(preemptions=0)
        self.preempted_at: dict[str, int] = {}
        theirs = getattr(IterationStats.update_from_events, "__wrapped__", IterationStats.update_from_events)

        def update(stats, name, events, is_prefilling, request, *others):
            if any(e.type == EngineCoreEventType.PREEMPTED for e in events):
                # The event comes with a token: the first after the preemption, or the last before it.
                self.preempted_at.setdefault(name.rpartition("-")[0], max(request.num_generation_tokens - 1, 0))
            return theirs(stats, name, events, is_prefilling, request, *others)

        update.__wrapped__ = theirs
        IterationStats.update_from_events = update

    def record(self, scheduler_stats, iteration_stats, *others, **more):
        if scheduler_stats:
            self.running, self.waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            self.total["prefix_hits"] += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats:
            self.total["preemptions"] += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self):
        pass


@dataclass(frozen=True)
class Job:
    """A request with `length` tokens of prompt. The first `shared` tokens are those of request `stem`.

    patience: share of the time of the last finished request after which it is cancelled; 0: never.
    """

    number: int
    stem: int
    shared: int
    length: int
    new: int
    patience: float

    def prompt(self, vocabulary: int) -> list[int]:
        parts = ((self.stem, self.shared), (self.number, self.length - self.shared))
        return [t for seed, n in parts for t in random.Random(seed).choices(range(3, vocabulary), k=n)]


def jobs(o: argparse.Namespace) -> Iterator[Job]:
    r, stems = random.Random(o.seed), list[tuple[int, int]]()
    for number in itertools.count(o.seed * 10**6):
        length = round(math.exp(r.uniform(math.log(o.shortest), math.log(o.longest))))
        stem, shared = r.choice(stems) if stems and r.random() < 1 / 3 else (number, 0)
        shared = r.randint(0, max(min(shared, length - 2 * BLOCK), 0))
        stems = [*stems[-15:], *([] if shared else [(number, length)])]
        patience = r.random() if r.random() < 0.1 else 0.0
        yield Job(number, stem, shared, length, r.randint(LEAST_NEW, MOST_NEW), patience)


@dataclass
class Run:
    o: argparse.Namespace
    engine: AsyncLLM
    counts: Counts
    usual: float = 1.0  # seconds of the last finished request
    total: Counter[str] = field(default_factory=Counter)
    sample: list[tuple[Job, list[int]]] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    again: list[dict] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    async def ask(self, job: Job, name: str, limit: float = LIMIT, logprobs: int | None = None) -> tuple[list, list]:
        """The tokens of the answer, and for each token the best `logprobs` tokens."""
        prompt = {"prompt_token_ids": job.prompt(min(self.engine.model_config.get_vocab_size(), 30_000))}
        how = SamplingParams(
            temperature=0.0, max_tokens=job.new, ignore_eos=True, detokenize=False, logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        got, best = [], []

        async def stream():
            async for out in self.engine.generate(prompt, how, name):
                got.extend(out.outputs[0].token_ids)
                best.extend(out.outputs[0].logprobs or [])

        await asyncio.wait_for(stream(), limit)
        if len(got) != job.new:
            self.faults["a request ended with another number of tokens than it asked for"] += 1
        return got, best

    async def serve(self, job: Job, r: random.Random) -> None:
        began = time.monotonic()
        try:
            got, _ = await self.ask(job, str(job.number), job.patience * self.usual or LIMIT)
        except asyncio.TimeoutError:
            self.total["cancelled"] += 1
            if not job.patience:
                self.faults[f"a request took longer than {LIMIT} s"] += 1
        except Exception as e:
            self.faults[f"a request failed: {type(e).__name__}: {next(iter(str(e).splitlines()), '')}"] += 1
        else:
            self.usual = time.monotonic() - began
            self.total.update(finished=1, prompt_tokens=job.length, new_tokens=job.new)
            self.sample.insert(r.randrange(self.total["finished"]), (job, got))  # the first few are a random sample
            del self.sample[self.o.again :]

    async def watch(self) -> None:
        began = time.monotonic()
        while True:
            used, *_ = await self.engine.collective_rpc("memory_used")
            used |= {"seconds": time.monotonic() - began, "client": resident_mib(), "running": self.counts.running}
            used |= {"waiting": self.counts.waiting, "preemptions": self.counts.total["preemptions"]}
            self.memory.append({k: round(v, 2) for k, v in used.items()})
            print(json.dumps(self.memory[-1]), flush=True)
            await asyncio.sleep(min(10, self.o.minutes * 2))

    async def load(self) -> None:
        """Requests at random times, until the time is over and all have ended."""
        r, tasks, todo = random.Random(self.o.seed + 1), set[asyncio.Task](), jobs(self.o)
        watching = asyncio.create_task(self.watch())
        end = time.monotonic() + self.o.minutes * 60
        while time.monotonic() < end and not self.engine.errored:
            if len(tasks) < MOST:
                tasks.add(task := asyncio.create_task(self.serve(next(todo), r)))
                task.add_done_callback(tasks.discard)
                self.total["requests"] += 1
            await asyncio.sleep(r.expovariate(self.o.rate))
        await asyncio.gather(*tasks)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def idle(self) -> None:
        """vLLM empties its prefix cache only if all blocks are free."""
        for _ in range(40):
            if await asyncio.wait_for(self.engine.reset_prefix_cache(), LIMIT):
                return
            await asyncio.sleep(0.25)
        self.faults["without requests, blocks are not free"] += 1

    async def check(self) -> None:
        """Run requests again, one at a time."""
        exact = self.engine.model_config.dtype == torch.float32
        whole = self.o.budget >= self.o.longest + MOST_NEW
        for job, before in self.sample:
            await self.idle()
            now, best = await self.ask(job, f"again{job.number}", logprobs=5)
            at = next((i for i, (a, b) in enumerate(zip(before, now)) if a != b), None)
            until = self.counts.preempted_at.get(str(job.number))
            row = {"request": job.number, "tokens": job.new, "differ_at": at, "preempted_at": until}
            if at is not None:
                known = {token: x.logprob for token, x in best[at].items()}
                row["gap"] = known[now[at]] - known.get(before[at], min(known.values()))
                if exact and row["gap"] > TIE and (whole or until is None or at < until):
                    self.faults["a request has other tokens when it runs again"] += 1
            self.again.append(row)
        await self.idle()
        if self.counts.running or self.counts.waiting or self.engine.output_processor.has_unfinished_requests():
            self.faults["requests are left in the engine"] += 1

    def growth(self) -> list[dict]:
        third, rows = len(self.memory) // 3, []
        for what, (share, mib) in GROWS.items():
            values = [m[what] for m in self.memory if what in m]
            if third and values:
                first, then = max(values[:third]), max(values[third:])
                rows.append({"MiB": what, "first third": first, "then": then, "end": values[-1]})
                if then > first * (1 + share) + mib:
                    self.faults[f"memory grew: {what}"] += 1
        return rows


def engine_options(o: argparse.Namespace, folder: str) -> dict:
    longest = o.longest + MOST_NEW
    ours = {"method": o.method, "kv": o.kv, "budget": o.budget} | json.loads(o.options)
    without_native = dict(
        kernel_config={"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}},
        compilation_config={"mode": 0, "custom_ops": ["none"]}, enforce_eager=True, kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    return dict(
        model=folder, dtype="auto" if o.model else "float32", skip_tokenizer_init=True, generation_config="vllm",
        attention_backend=seam().NAME, additional_config={"torchsparsekv": ours}, block_size=BLOCK, seed=0,
        num_gpu_blocks_override=o.blocks or 2 * -(-longest // BLOCK) + 1, max_model_len=longest, max_num_seqs=16,
        max_num_batched_tokens=8192, enable_prefix_caching=True, disable_log_stats=True,
        worker_extension_cls="mixed_load.Watch", **({} if NATIVE else without_native),
    ) | json.loads(o.vllm)  # fmt: skip


async def run(o: argparse.Namespace) -> dict:
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        if not o.model:
            tiny_llama(Path(folder), max_position_embeddings=o.longest + MOST_NEW)
        args = AsyncEngineArgs(**engine_options(o, o.model or folder))
        this = Run(o, AsyncLLM.from_engine_args(args, stat_loggers=[lambda *_: counts]), counts)
        try:
            await this.load()
            await this.check()
        except Exception as e:
            this.faults[f"the engine stopped: {type(e).__name__}: {e}"] += 1
        finally:
            this.engine.shutdown()
    memory, whole = this.growth(), [x for x in this.again if x["preempted_at"] is None]
    total = {**this.total, **counts.total, "again": len(this.again), "again, not preempted before": len(whole)}
    total["not preempted, all tokens equal"] = sum(x["differ_at"] is None for x in whole)
    total["all tokens equal"] = sum(x["differ_at"] is None for x in this.again)
    faults = [f"{what} ({n} times)" if n > 1 else what for what, n in this.faults.items()]
    return {"total": total, "memory": memory, "faults": faults, "again": this.again, "samples": this.memory}


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", default=default, type=type(default), help=f"{text} (default: {default})")
    o = parser.parse_args(given)
    result = asyncio.run(run(o))
    command = shlex.join(["python", "tests/tools/mixed_load.py", *(sys.argv[1:] if given is None else given)])
    if o.out:
        made = {"command": command, "environment": _results.environment() | {"vllm": version("vllm")}}
        Path(o.out).write_text(json.dumps(made | result, indent=1) + "\n")
    _results.print_table([{"count": k, "value": str(v)} for k, v in result["total"].items()])
    _results.print_table(result["memory"])
    print("\n".join(f"FAULT: {x}" for x in result["faults"]) or "no faults")
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
