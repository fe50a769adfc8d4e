"""Evaluations at a small size."""
from standin import LENGTH

from torchsparsekv import method
from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality.options import Options

SMALL = dict(
    tasks=("chain",), lengths=(LENGTH,), budgets=(32,), samples=12, probe=1, sink=16, window=16, skip_layers=1,
    hyper=("quest.block_size=4", "random.block_size=4"), device="cpu",
)  # fmt: skip


def evaluate(model, path, methods, **options) -> dict[str, dict]:
    """The table by "task method"."""
    o = Options(**{**SMALL, "methods": methods, **options})
    return {f"{r['task']} {r['method']}": r for r in quality.run(o, path / "eval.jsonl", model)}


def stand_in_for(monkeypatch, name: str, cls) -> None:
    """A method of the test's own, known by name for the length of the test."""
    monkeypatch.setitem(method._METHODS, name, cls)
