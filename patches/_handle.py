"""The handle that patch() returns. It makes caches, reports what they did, and restores the model."""
import copy
import threading
import weakref

from torchsparsekv.method import Method, as_int
from torchsparsekv.patches import _switch, _use
from torchsparsekv.patches._cache import SparseCache
from torchsparsekv.patches._memory import check_memory, hot_note, placed
from torchsparsekv.patches._plan import Memory, Plan
from torchsparsekv.patches._precompile import precompile
from torchsparsekv.patches._warn import warn
from torchsparsekv.report import LayerReport, Report, layer_report, rest_bytes

SMALLEST_BUCKET = 1024


class Handle:
    """An active patch. Use it as a context manager, or call `unpatch()`."""

    def __init__(
        self, model, plan: Plan, max_length: int | None, limit: int, offload: str, step: str, captures: bool,
        hot_gib: float | None = None,
    ):  # fmt: skip
        self.model, self.planned, self.max_length, self.limit = model, plan, max_length, limit
        self.offload, self.step, self.captures, self.hot_gib = offload, step, captures, hot_gib
        self.not_captured = ""  # the reason why generate() compiles its steps
        self._owner, self._base = _switch.Owner(), ""
        self._copied = False
        self._recycled: SparseCache | None = None  # generate() uses it again: the same addresses, the same graph
        self._latest: weakref.ref | None = None
        self._lock = threading.Lock()  # guards the choice of a cache: generate() may run in several threads
        self._last_report: Report | None = None  # set by unpatch()

    # ---- for users

    @property
    def active(self) -> bool:
        """Whether the patch is on the model."""
        return self._owner.active

    def make_cache(
        self, batch_size: int = 1, max_length: int | None = None, *, into: SparseCache | None = None
    ) -> SparseCache:
        """Make a cache for a loop of your own: `model(ids, past_key_values=cache)`.

        Args:
            batch_size: sequences of the cache.
            max_length: tokens of a sequence. None: `max_length` of patch(). If patch() has none, the cache has room for
                all positions of the model, and a warning says how much memory that takes.
            into: only `SparseCache(model)` passes it.
        """
        self._require_active()
        batch, length = self._sizes(batch_size, max_length)
        place = placed(self.planned, self.offload, batch, length, self.hot_gib)
        if max_length is None and self.max_length is None:
            self._say_how_much(batch, length)
        check_memory(self.planned, batch, length, place)
        cache = SparseCache.of_plan(self.planned, batch, length, self._owner, place, into=into)
        cache.patched_by = weakref.ref(self)
        precompile(cache.stored.values())
        self._latest = weakref.ref(cache)
        return cache

    def _say_how_much(self, batch: int, length: int) -> None:
        memory = self.plan(batch, length)
        host_mib, device_mib = memory.host_bytes / 2**20, memory.device_bytes / 2**20
        warn(
            f"a cache without max_length has room for {length} tokens, all positions of the model: "
            f"{host_mib:.1f} MiB of host memory and {device_mib:.1f} MiB on the device"
        )

    def _sizes(self, batch_size, max_length) -> tuple[int, int]:
        batch = as_int(batch_size)
        if type(batch) is not int:
            raise TypeError(f"batch_size must be an int, got {batch_size!r}")
        if batch < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch}")
        length = (self.max_length or self.limit) if max_length is None else as_int(max_length)
        if type(length) is not int or length < 1:
            raise ValueError(f"max_length must be a positive int, got {max_length!r}")
        if length > self.limit:
            raise ValueError(f"max_length {length} is above the limit of this patch, {self.limit}")
        return batch, length

    def plan(self, batch_size: int = 1, max_length: int | None = None) -> Memory:
        """The memory of a cache by buffer, before it exists. Allocates nothing.

        Args:
            batch_size: sequences of the cache.
            max_length: tokens of a sequence. None: as make_cache() chooses it.
        """
        batch, length = self._sizes(batch_size, max_length)
        place = placed(self.planned, self.offload, batch, length, self.hot_gib)
        notes = hot_note(self.planned, place, batch, length, self.hot_gib)
        place = place._replace(pool_on_host=place.pool_on_host and self.planned.device.type == "cuda")
        return self.planned.memory(batch, length, **place._asdict(), notes=notes)

    def fork(self, cache: SparseCache, batch_size: int | None = None) -> SparseCache:
        """Copy a cache, so that a prompt is read once and used many times. The original does not change.

        A fork runs no prompt. It costs the memory of a cache and one copy of the stored tokens and the index. A pool in
        host memory crosses the link twice.

        Args:
            cache: a cache of this patch.
            batch_size: sequences of the copy; a cache of one sequence can fill many. None: as many as `cache` has.
        """
        if not isinstance(cache, SparseCache) or cache.owner is not self._owner:
            raise ValueError(f"fork takes a SparseCache of this patch, got {type(cache).__name__}")
        batch, length = self._sizes(cache.batch if batch_size is None else batch_size, cache.max_length)
        if cache.batch not in (1, batch):
            raise ValueError(
                f"a cache of {cache.batch} sequences cannot be forked into {batch} sequences; a cache of one sequence "
                "can be forked into any number"
            )
        cache.check_copied()
        twin = self.make_cache(batch, length)
        twin.copy_from(cache)
        return twin

    def report(self) -> Report:
        """The counts of the latest cache, since it was made or reset.

        Each generate() resets the cache that it makes itself. A cache that you pass keeps counting. After unpatch() the
        report is the last one before it.
        """
        if self._last_report is not None:
            return self._last_report
        cache = self._latest() if self._latest else None
        if cache is None:
            return Report(self.planned.method.name, (), 0, 0, notes=self._notes())
        rows = tuple(layer_report(i, layer.method, layer.state) for i, layer in cache.stored.items())
        host_bytes, device_bytes = cache.nbytes()
        sizes = hot_note(self.planned, cache.place, cache.batch, cache.max_length, self.hot_gib)
        notes = (*self._notes(), *sizes, *self._whole(rows), *self._lost(rows))
        sums = rest_bytes(layer.state for layer in cache.stored.values())
        return Report(self.planned.method.name, rows, host_bytes, device_bytes, sums, notes)

    def unpatch(self) -> None:
        """Restore the model exactly, and free its caches."""
        if not self.active:
            return
        _switch.off(self.model, self._owner, self._base)
        cache, self._recycled = self._recycled, None
        self._last_report = self.report()
        del cache  # the report above needs it

    def __enter__(self) -> "Handle":
        self._require_active()
        return self

    def __exit__(self, *exc) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        state = "active" if self.active else "unpatched"
        length = self.max_length or f"grows to {self.limit}"
        planned = self.planned
        exceptions = planned.exceptions()
        layers = f"layers={{{', '.join(exceptions)}}}, " if exceptions else ""
        notes = "".join(f"; {note}" for note in planned.notes)
        pool = f", pool_dtype={str(planned.pool_dtype).removeprefix('torch.')!r}" if planned.pool_dtype else ""
        pool += f", hot_gib={self.hot_gib}" if self.hot_gib is not None else ""
        step = f", step={self.step!r}" if self.step != "auto" else ""
        return (
            f"<torchsparsekv {state} on {type(self.model).__name__}: {planned.method}, {layers}max_length={length}, "
            f"skip_layers={planned.skip_layers}, offload={self.offload!r}{pool}{step}{notes}>"
        )

    def _notes(self) -> tuple[str, ...]:
        """The lines of a report below its table."""
        exceptions = (f"layer {x}" for x in self.planned.exceptions())
        compiled = (f"decode steps are compiled, not captured: {self.not_captured}",) if self.not_captured else ()
        return (*exceptions, *self.planned.pool_said(), *self.planned.notes, *self.planned.reused(), *compiled)

    def _whole(self, rows: tuple[LayerReport, ...]) -> list[str]:
        """A line for each method that attended to every token, because such a run saves nothing."""
        found = [(self.planned.methods[r.layer], r.context_per_step) for r in rows if r.density == 1]
        saving = [(m, n) for m, n in found if m is not None and m.traits.attends != "everything"]
        methods = [m for m, n in saving if n <= m.dense_threshold or not m.traits.partial_blocks]
        return [
            f"density 1.000: {m.name} attended to every token, so nothing was saved here; sequences of up to "
            f"{m.dense_threshold} tokens are always attended to in full"
            for m in dict.fromkeys(methods)
        ]

    def _lost(self, rows: tuple[LayerReport, ...]) -> list[str]:
        """A line for each method that must keep more tokens than its window holds."""
        most: dict[Method, int] = {}
        for r in rows:
            method = self.planned.methods[r.layer]
            if method is not None and r.lost:
                most[method] = max(most.get(method, 0), r.lost)
        return [
            f"{m.name}: {n} tokens left the window of {m.window} and are lost; window={m.window + n} keeps them"
            for m, n in most.items()
        ]

    # ---- for the hooks

    def install(self) -> None:
        self._base = _switch.on(self.model, self, self._owner)

    def compile_instead(self, why: str) -> None:
        """Let generate() compile its steps from now on. The warning comes once."""
        if self.not_captured:
            return
        self.not_captured = why
        warn(
            f"decode steps of this {type(self.model).__name__} are compiled from now on, which takes a "
            f"minute the first time, because they cannot be captured as a CUDA graph: {why}"
        )

    def hold(self, cache: SparseCache, *, chunked: bool) -> bool:
        """Reserve a cache for the running generate(). False if no generate() wrapper will see the end of the call."""
        held = _use.hold(cache.use, chunked=chunked)
        self._latest = weakref.ref(cache)
        return held

    def cache_for_generate(self, batch: int, needed: int, *, keep: bool, chunked: bool = False) -> SparseCache:
        """The cache of a generate() call. `keep`: the user gets the cache, so no later call may use it again. A cache
        whose call still runs is not used either."""
        if needed > (self.max_length or self.limit):
            raise ValueError(
                f"prompt and new tokens need a cache of {needed} tokens, and max_length of this patch is "
                f"{self.max_length or self.limit}"
            )
        length = self.max_length or min(self.limit, max(SMALLEST_BUCKET, 1 << (needed - 1).bit_length()))
        with self._lock:
            c = self._recycled
            busy = c is not None and c.use.generating
            if c is not None and not keep and not busy and (c.batch, c.max_length) == (batch, length):
                held = self.hold(c, chunked=chunked)
                if held:  # otherwise nothing marks the end of the call, and the next call would take this cache
                    c.reset()
                    return c
            if not busy:
                c = self._recycled = None  # free the old one before the new one is made
            c = self.make_cache(batch, length)
            if self.hold(c, chunked=chunked) and not keep and not busy:
                self._recycled = c
        return c

    def _require_active(self) -> None:
        if not self.active:
            raise RuntimeError("this handle is unpatched: call patch() again")

    def __reduce__(self):
        raise TypeError("a patched model cannot be pickled: call unpatch() first, and patch again where it is loaded")

    def __deepcopy__(self, memo):
        """A deep copy of the model is patched like the original, with caches of its own. The copied model has no
        modules yet when this runs, so nothing here may look at them."""
        twin = Handle(
            None, self.planned, self.max_length, self.limit, self.offload, self.step, self.captures,
            self.hot_gib,
        )  # fmt: skip
        memo[id(self)] = twin
        twin.model, twin._owner = copy.deepcopy(self.model, memo), copy.deepcopy(self._owner, memo)
        twin._base, twin._copied = self._base, True
        if twin.active:
            _switch.activate(twin._owner)
        return twin
