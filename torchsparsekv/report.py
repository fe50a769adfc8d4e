"""What a patched model did: proof that the method ran, and what it cost."""
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torchsparsekv.ops.store.rows import STATS, counted, stored_width
from torchsparsekv.state import LayerState


@dataclass(frozen=True)
class LayerReport:
    """The counts of one layer. Fields that end in `_per_step` are means over steps, sequences and kv heads.

    Attributes:
        layer: index of the layer.
        method: name of its method.
        steps: decode steps that ran through the layer.
        context_per_step: tokens that a step could attend to.
        attended_per_step: tokens that a step did attend to.
        blocks_selected: blocks that the steps selected, summed over steps, sequences and kv heads.
        blocks_fetched: selected blocks that were not in the hot buffer.
        fetched_late: fetched blocks that arrived after the attention of their step, while later layers computed.
        pool_bytes_read: bytes that steps read from the pool.
        host_bytes_read: the same if the pool is in host memory, else 0.
        retrieval_rate: share of the steps that selected anew.
        static_share: share of the budget that is attended to whatever the query. None: the method has no static set.
        lost: tokens that the method should keep and its window did not hold, in the worst head. None: does not apply.
        at_most: whether partly empty pages count as full in `attended_per_step`.
        waited: share of the steps at which a kv head waited for its selection, as a mean over sequences and kv heads.
            None: without `prefetch_async`.
        prompted: whether a prompt ran through the layer.
    """

    layer: int
    method: str
    steps: int
    context_per_step: float
    attended_per_step: float
    blocks_selected: int
    blocks_fetched: int
    fetched_late: int
    pool_bytes_read: int
    host_bytes_read: int
    retrieval_rate: float
    static_share: float | None = None
    lost: int | None = None
    at_most: bool = False
    waited: float | None = None
    prompted: bool = False

    @property
    def density(self) -> float:
        """Attended tokens / tokens of the context."""
        return self.attended_per_step / self.context_per_step if self.context_per_step else float("nan")

    @property
    def hit_rate(self) -> float:
        """Share of the selected blocks that were in the hot buffer."""
        return 1 - self.blocks_fetched / self.blocks_selected if self.blocks_selected else float("nan")


@dataclass(frozen=True)
class Report:
    """What a cache did. `print(report)` is a table, `as_dict()` is for machines.

    Attributes:
        method: the method of the patch.
        layers: one `LayerReport` per layer.
        host_bytes: host memory of the cache.
        device_bytes: GPU memory of the cache.
        rest_bytes: the part of `device_bytes` that holds the sums of `estimate_rest`.
        notes: layers that run another method, and defaults that did not fit.
    """

    method: str
    layers: tuple[LayerReport, ...]
    host_bytes: int
    device_bytes: int
    rest_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Signs that the method did not run, such as layers that no step reached. `print` shows them after `!!`."""
        if not self.layers:
            return ["NOTHING TO REPORT ON: no cache was made, or the latest one is gone (report before you drop it)"]
        idle = [r.layer for r in self.layers if r.steps == 0]
        if len(idle) == len(self.layers):
            prompted = any(r.prompted for r in self.layers)
            why = "only a prompt did" if prompted else "the model was not called, or with another cache"
            return [f"NO DECODE STEP RAN THROUGH THE PATCH: {why}"]
        return [f"LAYERS NEVER REACHED: {idle}"] if idle else []

    def as_dict(self) -> dict:
        """All fields as plain Python values; None where a share is undefined."""
        known = lambda x: None if math.isnan(x) else x  # noqa: E731  (JSON has no NaN)
        rows = [{**asdict(r), "density": known(r.density), "hit_rate": known(r.hit_rate)} for r in self.layers]
        return {**asdict(self), "layers": rows, "warnings": self.warnings}

    def __str__(self) -> str:
        head = (
            f"{'layer':>5} {'method':<10} {'steps':>7} {'context':>10} {'attended':>9} "
            f"{'density':>8} {'selected':>9} {'fetched':>8} {'hits':>6} {'from host':>10}"
        )
        lines = [f"torchsparsekv: {self.method}", head]
        for r in self.layers:
            hits, most = f"{r.hit_rate:.2f}" if r.blocks_selected else "-", "<=" if r.at_most else ""
            attended, density = f"{most}{r.attended_per_step:.1f}", f"{most}{r.density:.3f}"
            lines.append(
                f"{r.layer:>5} {r.method:<10} {r.steps:>7} {r.context_per_step:>10.1f} {attended:>9} {density:>8} "
                f"{r.blocks_selected:>9} {r.blocks_fetched:>8} {hits:>6} {size_of(r.host_bytes_read):>10}"
            )
        if any(r.at_most for r in self.layers):
            lines.append("<=: partly empty pages count as full")
        seldom = [r.retrieval_rate for r in self.layers if 0 < r.retrieval_rate < 1]
        if seldom:
            lines.append(f"selected anew at {sum(seldom) / len(seldom):.1%} of the steps")
        waited = [r.waited for r in self.layers if r.waited is not None]
        if waited:
            fetched, late = (sum(getattr(r, x) for r in self.layers) for x in ("blocks_fetched", "fetched_late"))
            lines.append(
                f"kv heads waited for their selection at {sum(waited) / len(waited):.1%} of the steps; of the fetched "
                f"blocks, {late / max(1, fetched):.1%} arrived after the attention of their step"
            )
        static = [f"{r.layer}: {r.static_share:.3f}" for r in self.layers if r.static_share is not None]
        if static:
            lines.append(f"static share of the budget by layer: {', '.join(static)}")
        sums = f", of which {size_of(self.rest_bytes)} for estimate_rest" if self.rest_bytes else ""
        lines.append(f"cache memory: {size_of(self.host_bytes)} host, {size_of(self.device_bytes)} device{sums}")
        return "\n".join([*lines, *self.notes, *(f"!! {w}" for w in self.warnings)])


def size_of(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"


class Counts(NamedTuple):
    """The device counters of one layer, each summed over steps, sequences and kv heads, and the size of a pool row."""

    steps: int
    context: int  # tokens that sequences held at the steps
    in_ring: int  # tokens of the ring that steps attended to
    selected: int  # blocks
    fetched: int  # blocks, those fetched late too
    row_bytes: int  # bytes of one token in the pool

    def per_step(self, total: float) -> float:
        """The mean over steps, sequences and kv heads."""
        return total / max(self.steps, 1)


def layer_report(layer: int, method, state: LayerState) -> LayerReport:
    """The report of one layer. It reads device counters and waits for the device, so call it between steps."""
    total = dict(zip(STATS, state.stats.counts.sum((0, 1)).tolist()))
    steps = int(counted(state.stats.counts, "steps").max())
    selected, late, waits = total["selected"], 0, None
    if method.prefetch_async is not None and steps:
        selected, late = (int(counted(state.prefetch.counts, name).sum()) for name in ("selected", "missed"))
        waits = int(state.prefetch.waits.sum())
    row_bytes = stored_width(state.store.pool) * state.store.pool.dtype.itemsize
    fetched = total["missed"] + late
    counts = Counts(total["steps"], total["context"], total["in_ring"], total["selected"], fetched, row_bytes)
    row = method.report_row(state, counts)
    return LayerReport(
        layer=layer,
        method=method.name,
        steps=steps,
        context_per_step=counts.per_step(counts.context),
        blocks_selected=selected,
        blocks_fetched=fetched,
        fetched_late=late,
        host_bytes_read=row["pool_bytes_read"] if state.pool_on_host else 0,
        at_most=method.traits.partial_blocks,
        waited=None if waits is None else counts.per_step(waits),
        prompted=bool((state.lengths.length > 0).any()),
        **row,
    )


def rest_bytes(states: Iterable[LayerState]) -> int:
    """The bytes of the sums of `estimate_rest` in these layers."""
    return sum(s.rest.sums.nbytes for s in states if "rest" in s.buffers)


def cache_bytes(states: Iterable[LayerState]) -> tuple[int, int]:
    """(host, device) bytes of the tensors that these layers hold."""
    host = device = 0
    for s in states:
        for b, t in s.tensors():
            if b.home == "pool" and s.pool_on_host:
                host += t.nbytes
            else:
                device += t.nbytes
    return host, device
