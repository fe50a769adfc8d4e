"""Train the recall model: one command, one GPU, a time budget.

    python -m torchsparsekv_benchmarks.recall_model.train --out weights --minutes 8.5
    python -m torchsparsekv_benchmarks.recall_model.train --out tried --quick            (CPU, half a minute)

The schedule goes by the clock. Whatever the speed, lengths grow from 256 to 32K, and the learning rate falls to zero
when the time is up. --out receives the model, its tokenizer, config.json, train.jsonl (a line every few seconds) and
accuracy.json.

Small experiments on a CPU (48 key words, length 128, 4096 tokens a step):
- With Muon for the matrices the model begins to retrieve after 350 steps. With AdamW at 3e-3 alone it has not begun
  after 400.
- If layers 0 and 1 see 16 tokens at first, retrieval begins after 220 steps, in the layers above, where it is wanted.
  After 330 steps 0.90 of the answer tokens of `ask` are right.
- If these layers then see everything, at twice the length, the share falls to 0.43. It is 0.98 after 90 more steps.
- Norms of q and k that begin at 1.6 instead of 1 do not help.
"""
import argparse
import contextlib
import dataclasses
import json
import random
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.recall_model import accuracy, documents, flat, optimizer
from torchsparsekv_benchmarks.recall_model import model as shipped
from torchsparsekv_benchmarks.recall_model.tasks import CODES

LOG_EVERY = 4.0  # seconds
AHEAD = 16  # batches made beforehand


@dataclass(frozen=True)
class Options:
    out: Path
    minutes: float = 8.5
    steps: int = 0  # instead of a time
    seed: int = 0
    tokens: int = 131072  # a step
    # Until which share of the time -> of a hundred steps, how many have which length.
    stages: tuple[tuple[float, dict[int, int]], ...] = (
        (0.10, {256: 100}),
        (0.25, {1024: 75, 256: 25}),
        (0.42, {4096: 65, 1024: 25, 256: 10}),
        (0.66, {16384: 60, 4096: 25, 1024: 15}),
        (1.00, {65536: 10, 32768: 50, 16384: 20, 4096: 12, 1024: 8}),
    )
    muon: float = 0.02  # peak rates
    adam: float = 3e-3
    warm: float = 0.02  # shares of the time: the rate rises until here ...
    fall: float = 0.45  # ... and falls from here on, to zero
    other: float = 0.1  # weight of the tokens that are no answers
    clip: float = 1.0
    gain: float = 1.0  # of the norms of q and k, to begin with
    window: int = 16  # what layers 0 and 1 see while no batch is longer than `window_until`; 0: everything
    window_until: int = 1024
    workers: int = 12
    model: dict = field(default_factory=dict)
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768, 65536)  # of the final accuracy table
    samples: int = 32
    reserve: float = 75.0  # seconds for that table

    def lengths_at(self, progress: float) -> dict[int, int]:
        return next((mix for until, mix in self.stages if progress < until), self.stages[-1][1])

    def rate(self, progress: float) -> float:
        return max(0.0, min(1.0, progress / self.warm, (1 - progress) / (1 - self.fall)))


QUICK = dict(
    steps=120, tokens=2048, stages=((0.7, {128: 100}), (1.0, {256: 50, 128: 50})), workers=0, lengths=(128,),
    samples=4, reserve=6.0, model=dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16),
)  # fmt: skip


class Clock:
    """Progress of the training, 0 to 1: of the time from the first finished step to `end`, or of `steps` if given."""

    def __init__(self, end: float, steps: int):
        self.begin: float | None = None
        self.end, self.steps, self.taken = end, steps, 0
        self.waited = 0.0  # seconds, for batches

    def start(self) -> None:
        self.begin = time.monotonic()

    def __call__(self) -> float:
        if self.steps:
            return self.taken / self.steps
        return 0.0 if self.begin is None else (time.monotonic() - self.begin) / (self.end - self.begin)


def feed(o: Options, clock: Clock, pool: ProcessPoolExecutor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end, made a few steps ahead; what a batch holds follows from seed, step and length."""
    choose, step = random.Random(o.seed), 0
    ready: deque[Future] = deque()
    while True:
        while len(ready) < (AHEAD if pool else 1):
            mix = o.lengths_at(clock())
            length = choose.choices(list(mix), list(mix.values()))[0]
            job = (o.seed + 2, step, length, o.tokens // length)
            if pool:
                ready.append(pool.submit(documents.batch, *job))
            else:
                ready.append(Future())
                ready[-1].set_result(documents.batch(*job))
            step += 1
        begin = time.monotonic()
        ids, codes = (torch.from_numpy(a) for a in ready.popleft().result())
        clock.waited += time.monotonic() - begin
        yield ids, codes


def fastest_attention(tokens: int):
    """A context in which attention runs on the backend that is the faster one, forward and backward, at 32K."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    length, times = min(32768, tokens), {}
    q = torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(1, 2, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                for _ in range(3):
                    begin = time.monotonic()
                    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
                    out.backward(out.detach())
                    torch.cuda.synchronize()
                    times[backend] = time.monotonic() - begin
        except RuntimeError as e:
            print(f"{backend.name} is not available here: {str(e).splitlines()[0]}", flush=True)
    print("attention at 32K, ms:", {b.name: round(1e3 * t, 2) for b, t in times.items()}, flush=True)
    first = min(times, key=lambda b: times[b])
    return sdpa_kernel([first, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


class Meter:
    """What has been seen since the last line of the log, kept on the device until that line is due."""

    def __init__(self, out: Path, model, clock: Clock):
        self.file, self.model, self.clock = (out / "train.jsonl").open("w"), model, clock
        self.born = self.since = time.monotonic()
        self.seen: dict[int, Tensor] = {}
        self.tokens = self.steps = 0

    def add(self, length: int, seen: Tensor, norm: Tensor, tokens: int) -> None:
        self.seen[length] = self.seen[length] + seen if length in self.seen else seen
        self.norm, self.tokens, self.steps = norm, self.tokens + tokens, self.steps + 1

    def reach(self) -> list[float]:
        """By layer, the largest attention logit that the norms of q and k allow."""
        layers = [layer.self_attn for layer in self.model.model.layers]
        gains = [(a.q_norm.weight * a.k_norm.weight).abs().max() * a.head_dim**0.5 for a in layers]
        return [round(x, 1) for x in torch.stack(gains).tolist()]

    def line(self, rate: float) -> None:
        now = time.monotonic()
        by_length: dict[int, dict[str, float]] = {}
        for length, seen in sorted(self.seen.items()):
            count, right, loss = seen.tolist()
            kinds = {kind: round(right[c] / count[c], 4) for kind, c in CODES.items() if count[c]}
            total = max(1.0, sum(count[1:]))
            by_length[length] = {
                "loss": round(sum(loss[1:]) / total, 4), "other": round(loss[0] / max(1.0, count[0]), 4),
                "accuracy": round(sum(right[1:]) / total, 4), **kinds,
            }  # fmt: skip
        seconds, speed = round(now - self.born, 1), int(self.tokens / (now - self.since))
        gradient, reach = round(float(self.norm), 3), self.reach()
        found = {
            "seconds": seconds, "step": self.steps, "progress": round(self.clock(), 4), "rate": round(rate, 4),
            "tokens_per_s": speed, "waited": round(self.clock.waited, 1), "gradient": gradient, "reach": reach,
            "by_length": by_length,
        }  # fmt: skip
        print(json.dumps(found), file=self.file, flush=True)
        short = "  ".join(f"{n}: " + " ".join(f"{k}={v:.3f}" for k, v in row.items()) for n, row in by_length.items())
        print(f"{seconds:6.1f}s {self.steps:5d} {speed / 1e6:.2f}M/s waited {self.clock.waited:.1f}s rate {rate:.2f} "
              f"grad {gradient:.2f} reach {reach}  {short}", flush=True)  # fmt: skip
        self.seen, self.tokens, self.since = {}, 0, now
        if not all(row["loss"] == row["loss"] for row in by_length.values()):
            raise FloatingPointError("the loss is not a number any more")


def train(o: Options, model, clock: Clock, pool: ProcessPoolExecutor | None) -> None:
    device = model.device
    cuda = device.type == "cuda"
    whole, opt = flat.Flat(model, compiled=cuda), optimizer.Optimizer(model, muon=o.muon, adam=o.adam)
    meter, behind = Meter(o.out, model, clock), deque[torch.cuda.Event]()
    for n, (ids, codes) in enumerate(feed(o, clock, pool)):
        progress = clock()
        if progress >= 1:
            break
        early = max(o.lengths_at(progress)) <= o.window_until
        windows = {0: o.window, 1: o.window} if o.window and early else {}
        ids, codes = (t.pin_memory().to(device, non_blocking=True) if cuda else t for t in (ids, codes))
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss, seen = whole(ids.long(), codes, o.other, windows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        opt.step(o.rate(progress))
        meter.add(ids.shape[1], seen, norm, ids.numel())
        clock.taken += 1
        if n == 0:
            meter.line(0.0)  # waits for the step, so compilation does not count
            clock.start()
        if cuda:  # the clock is read two steps behind the device at most, without ever waiting for all of it
            behind.append(torch.cuda.Event())
            behind[-1].record()
            if len(behind) > 2:
                behind.popleft().synchronize()
        if time.monotonic() - meter.since > LOG_EVERY:
            meter.line(o.rate(progress))
    if meter.seen:
        meter.line(0.0)


def finish(o: Options, model, began: float) -> None:
    """Write the folder, load it again, and say how good it is."""
    torch.cuda.empty_cache()
    model.to(torch.bfloat16).save_pretrained(o.out)
    shipped.tokenizer().save_pretrained(o.out)
    dtype = torch.bfloat16 if model.device.type == "cuda" else torch.float32
    loaded, _ = shipped.load(o.out, device=model.device, dtype=dtype)
    rows = accuracy.table(loaded, o.lengths, o.samples)
    length = min(4096, max(o.lengths))
    local = accuracy.locality(loaded, length, max(1, 8 * 4096 // length) if o.workers else 4, length // 8)
    seconds = round(time.monotonic() - began, 1)
    found = {"greedy": rows, "samples": o.samples, "locality": {"length": length, **local}, "seconds": seconds}
    options = {k: v for k, v in dataclasses.asdict(o).items() if k != "out"}
    found |= {"options": options, "environment": _results.environment()}
    (o.out / "accuracy.json").write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{k}: {v}" if k == "task" else f"{k} {v:.3f}" for k, v in row.items()), flush=True)
    for name, kinds in local.items():
        print(f"{name:24s} {kinds}", flush=True)
    print(f"{seconds} s in all, {(o.out / 'model.safetensors').stat().st_size / 1e6:.1f} MB", flush=True)


def run(o: Options) -> None:
    began = time.monotonic()
    o.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(o.seed)
    model = shipped.build(**o.model).to(device).train()
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data.fill_(o.gain)
        layer.self_attn.k_norm.weight.data.fill_(o.gain)
    clock = Clock(began + 60 * o.minutes - o.reserve, o.steps)
    pool = ProcessPoolExecutor(o.workers, get_context("spawn")) if o.workers else None
    try:
        with fastest_attention(o.tokens) if device.type == "cuda" else contextlib.nullcontext():
            train(o, model, clock, pool)
    finally:
        if pool:
            pool.shutdown(wait=False, cancel_futures=True)
    finish(o, model, began)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--quick", action="store_true", help="a tiny model, lengths 128 and 256, on any device")
    for name, kind in (("minutes", float), ("steps", int), ("seed", int), ("muon", float), ("adam", float),
                       ("gain", float), ("window", int), ("other", float), ("workers", int), ("fall", float),
                       ("reserve", float), ("samples", int)):  # fmt: skip
        p.add_argument(f"--{name}", type=kind)
    given = {k: v for k, v in vars(p.parse_args()).items() if v is not None}
    run(Options(**{**(QUICK if given.pop("quick") else {}), **given}))


if __name__ == "__main__":
    main()
