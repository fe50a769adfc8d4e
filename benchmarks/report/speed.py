"""Figures of `bench`: time per token, throughput, memory, and the stages of a decode step."""
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchsparsekv_benchmarks.report import style
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, by_model, of
from torchsparsekv_benchmarks.report.load import DECODE, KERNELS, PREFILL, THROUGHPUT, Result

Line = tuple[str, str, list[tuple[int, float]]]  # label, method, points by context
STATIC = "hf-static"
NAMES = {
    "full": "dense", "hf-static": "HF static cache", "sdpa-cudnn": "cuDNN", "sdpa-flash": "flash",
    "flashinfer": "FlashInfer",
}  # fmt: skip
# Options that make a method another line, and how they are said.
SETUP = {
    "budget": "budget {}", "skip_layers": "{} dense layers", "locality": "locality {}", "offload": "pool in {} memory",
    "pool_dtype": "pool in {}", "trace": "replay of {}",
}  # fmt: skip
BEFORE = {"pool_dtype": "auto", "trace": "", "host_share": 0.85}  # what acted in files that are older than an option
SAID = {"auto": "the model's type"}
FLOOR = 256
DEFAULT_BUDGET = "Budget: the methods' defaults, tokens per kv head and step beside sink and window."
PROMPT = (("ttft_ms", "milliseconds", ".0f"), ("peak_GiB", "peak GPU memory, GiB, weights included", ".1f"))
MISSES, BESIDE = "misses", "(beside)"
OF_RUNS = (
    "Of several runs, each with a floor of its own, of which the first is drawn: between two runs, a difference below "
    "0.3 ms says little. "
)


def name(method: str) -> str:
    return NAMES.get(method, method)


def named(row: dict) -> str:
    """The method of a row, and what it has else than its defaults."""
    return name(row["method"]) + (f", {row['hyper']}" if "hyper" in row else "")


def counted(sources: Iterable[Result]) -> str:
    """How the budget is counted in files of `decode` and what they run on."""
    parts = []
    for o in dict.fromkeys((r.options.get("budget"), r.options.get("sink"), r.options.get("window")) for r in sources):
        if o[0] is not None:
            parts.append(f"{o[0]} tokens per kv head and step, beside {o[1]} sink and {o[2]} latest tokens")
    return f"Budget: {'; '.join(parts)}." if parts else ""


# ---------------------------------------------------------------- time per token


def tpot(plt, results: list[Result]) -> list[Drawn]:
    """A figure for each model and batch."""
    out = []
    for every in by_model(of(results, DECODE)):
        for batch in sorted({r["batch"] for s in every for r in s.rows}):
            sources = [s for s in every if batch in {r["batch"] for r in s.rows}]
            series, floor = lines(sources, batch), next(iter(_floors(sources, batch)), None)
            tag = str(sources[0].options.get("shape")) + (f", batch {batch}" if batch > 1 else "")
            for context in contexts(series):
                figure = (tpot_lines if context is None else _tpot_bars)(plt, within(series, context), floor)
                out.append(Drawn(figure, _tpot_note(sources, batch), tuple(sources), tag + _of(context)))
    return out


def contexts(series: Sequence[Line]) -> list[int | None]:
    """A figure each: None is of the lines over several contexts, then those contexts of which a line has no other."""
    over = [points for _, _, points in series if len(points) > 1]
    alone = {points[0][0] for _, method, points in series if len(points) == 1 and method != STATIC}
    return [*([None] if over else []), *sorted(alone)]


def _of(context: int | None) -> str:
    return "" if context is None else f", {style.tokens(context)}"


def within(series: Sequence[Line], context: int | None) -> list[Line]:
    """What belongs in that figure. HF's static cache has one point, so slow that it would flatten bars."""
    if context is None:
        return [line for line in series if len(line[2]) > 1 or line[1] == STATIC]
    at = [(label, method, [p for p in points if p[0] == context]) for label, method, points in series]
    return [line for line in at if line[2] and line[1] != STATIC]


def _tpot_bars(plt, series: Sequence[Line], floor: float | None):
    """Of one context there is no line to draw."""
    rows = sorted(((label, points[0][1], style.colour(method)) for label, method, points in series), key=lambda r: r[1])
    if floor:
        rows.append((f"floor: {FLOOR} tokens", floor, style.GRID))
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.4 * len(rows)))
    style.bars(axes, rows, f"milliseconds per token at {style.tokens(series[0][2][0][0])}", ".2f")
    return figure


def _draw(axes, line: Line) -> str:
    """In the colour of its method, which is returned; dotted, where it is not set up as the plain one."""
    label, method, points = line
    plain, shade = label == name(method), style.colour(method)
    axes.plot(*zip(*points), color=shade, marker="o" if plain else "D", linestyle="-" if plain else ":")
    return shade


def tpot_lines(plt, series: Sequence[Line], floor: float | None):
    figure, axes = plt.subplots(figsize=(8, 4.2))
    top = 1.12 * max(y for _, method, points in series for _, y in points if method != STATIC)
    ends, every = [], {x for _, _, points in series for x, _ in points}
    style.token_axis(axes, sorted(every), "context")
    axes.set_ylabel("milliseconds per token")
    axes.set_ylim(0, top)
    for label, method, points in series:
        shown = [(x, y) for x, y in points if y <= top]
        shade = _draw(axes, (label, method, shown))
        ends += [(*shown[-1], label, shade)] if shown else []
        for x, y in points[len(shown) :]:  # so slow that it would flatten all others
            axes.plot(x, top, marker="^", color=shade, clip_on=False)
            side, ha = (6, "left") if x == min(every) else (-6, "right")  # names of lines are to the right
            axes.annotate(f"{label}: {y:.0f} ms", (x, top), (side, -9), textcoords="offset points", fontsize=9,
                          color=shade, ha=ha)  # fmt: skip
    if floor:
        axes.axhline(floor, color=style.SOFT, linewidth=1, linestyle=(0, (2, 3)), zorder=1)
        axes.annotate(f"floor: {FLOOR} tokens, {floor:.2f} ms", (max(every), floor), (0, -12), fontsize=8.5,
                      textcoords="offset points", color=style.SOFT, ha="right")  # fmt: skip
    style.name_lines(axes, ends)
    return figure


def _tpot_note(sources: list[Result], batch: int) -> str:
    o, steps = sources[0].options, sorted({s.options["steps"] for s in sources})
    several = OF_RUNS if len(set(_floors(sources, batch))) > 1 else ""
    return (
        f"One compiled decode step at batch {batch}; {', '.join(setup(o))}, where the name does not say "
        "otherwise. dense: our dense attention, its pool in GPU memory; cuDNN, flash and FlashInfer: theirs, over all "
        "of a static cache and without a mask. Locality: how slowly queries move (1: not at "
        "all, 0: every block new at every step). Median of 3 runs of "
        f"{' or '.join(map(str, steps))} steps. {several}{counted(sources)}"
    )


def _floors(sources: list[Result], batch: int) -> list[float]:
    mine = (STATIC, FLOOR, batch)
    return [r["tpot_ms"] for s in sources for r in s.rows if (r["method"], r["context"], r["batch"]) == mine]


def lines(sources: list[Result], batch: int = 1, column: str = "tpot_ms", aside: Sequence[str] = ()) -> list[Line]:
    """The first file's setup is the plain one; what others do differently is in the label, but for what is `aside`."""
    first = BEFORE | sources[0].options
    out: dict[tuple[str, str], dict[int, float]] = {}
    for s in sources:
        for r in s.rows:
            if r["batch"] != batch or (r["method"] == STATIC and r["context"] == FLOOR) or not r.get(column):
                continue
            own = {"locality": r["locality"]} if "locality" in r else {}  # of the text that its method was measured on
            said = {k: v for k, v in (BEFORE | s.options | own).items() if k not in aside}
            label = called(r, first, said)
            out.setdefault((label, r["method"]), {}).setdefault(r["context"], r[column])
    return [(label, method, sorted(points.items())) for (label, method), points in out.items()]


def called(row: dict, first: dict, options: dict) -> str:
    """A row's method, and what its options have else than the first ones; these do not act on dense attention."""
    other = setup({k: v for k, v in options.items() if v != first.get(k)} if row["method"] not in NAMES else {})
    own = setup({"pool_dtype": row["pool"]}) if "pool" in row else []
    return ", ".join([named(row), *own, *other])


def setup(options: dict) -> list[str]:
    """The options of SETUP that were recorded, in words."""
    told = {k: f"{v:g}" if isinstance(v, float) else v for k, v in options.items() if k in SETUP and v != ""}
    told |= {"trace": Path(told["trace"]).name} if "trace" in told else {}
    return [words.format(SAID.get(told[k], told[k])) for k, words in SETUP.items() if k in told]


# ---------------------------------------------------------------- throughput


def throughput(plt, results: list[Result]) -> list[Drawn]:
    """A figure for each context, cap on host memory and trace: what differs in these is no comparison."""
    groups: dict[tuple, list[Result]] = {}
    for sources in by_model(of(results, THROUGHPUT)):
        for s in sources:
            told = s.options.get
            same = (told(x) for x in ("shape", "context", "host_gib", "host_share", "steps", "trace"))
            groups.setdefault(tuple(same), []).append(s)
    return [_throughput_of(plt, sources) for sources in groups.values()]


def _against_batch(axes, each: list[tuple[str, dict]]) -> None:
    ends = []
    for method, label in dict.fromkeys((r["method"], label) for label, r in each):
        shade = style.colour(method)
        points = sorted((r["batch"], r["tokens_per_s"], r["cap_GiB"]) for its, r in each if its == label)
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color=shade)
        for x, y, cap in points:
            axes.annotate(f"{y:.0f} in {cap:g} GiB", (x, y), (7, -13), textcoords="offset points", fontsize=8,
                          color=style.SOFT)  # fmt: skip
        ends.append((*points[-1][:2], label, shade))
    axes.set_xlabel("batch: the largest that fits")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.12 * max(r["batch"] for _, r in each))
    style.name_lines(axes, ends)


def _throughput_of(plt, sources: list[Result]) -> Drawn:
    first = BEFORE | sources[0].options
    each = [(called(r, first, BEFORE | s.options), r) for s in sources for r in s.rows if r["batch"]]
    caps = {r["cap_GiB"] for _, r in each}
    figure, axes = plt.subplots(figsize=(8, 3.8 if len(caps) > 1 else 0.9 + 0.35 * len(each)))
    if len(caps) > 1:
        _against_batch(axes, each)
    else:
        shown = [(f"{label}, batch {r['batch']}", r["tokens_per_s"], style.colour(r["method"])) for label, r in each]
        style.bars(axes, shown, f"tokens per second in {caps.pop():g} GiB", ".0f")
    o = sources[0].options
    share = o.get("host_share", BEFORE["host_share"])
    host = f", and {share:g} of {o['host_gib']:g} GiB of host memory" if o.get("host_gib") else ""
    note = (
        f"Context {style.tokens(o['context'])}; for each cap on GPU memory, weights included{host}, the largest batch "
        f"that fits; {', '.join(setup(o))}. Median of 3 runs of {o['steps']} steps. "
        f"{counted(sources) or DEFAULT_BUDGET}"
    )
    return Drawn(figure, note, tuple(sources), str(o.get("shape")))


# ---------------------------------------------------------------- memory


def memory(plt, results: list[Result]) -> list[Drawn]:
    out = []
    for sources in by_model(of(results, DECODE)):
        single = [s for s in sources if 1 in {r["batch"] for r in s.rows}]
        series = {where: lines(single, 1, f"{where}_GiB", ("locality",)) for where in ("device", "host")}
        note = f"The cache of one row, read off its tensors; weights and activations are not in it. {counted(single)}"
        for context in contexts(series["device"]):
            tag = str(sources[0].options.get("shape")) + _of(context)
            figure = _memory_of(plt, {where: within(found, context) for where, found in series.items()}, context)
            out.append(Drawn(figure, note, tuple(single), tag))
    return out


def _memory_of(plt, series: dict[str, list[Line]], context: int | None):
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 3.8 if context is None else 0.9 + 0.35 * len(series["device"])))
    figure.subplots_adjust(wspace=0.75)
    for axes, (where, found) in zip(panels, series.items()):
        _memory_panel(axes, found, context)
        axes.set_title({"device": "GPU memory", "host": "pinned host memory"}[where])
    return figure


def _memory_panel(axes, series: Sequence[Line], context: int | None) -> None:
    if context is not None:
        shown = [(label, points[0][1], style.colour(method)) for label, method, points in series]
        return style.bars(axes, shown, f"GiB at {style.tokens(context)}", ".1f")
    ends = []
    for label, method, points in series:
        ends.append((*points[-1], label, _draw(axes, (label, method, points))))
    style.token_axis(axes, sorted({x for _, _, points in series for x, _ in points}), "context")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GiB")
    style.name_lines(axes, ends)


# ---------------------------------------------------------------- stages


def stages(plt, results: list[Result]) -> list[Drawn]:
    return [_stages(plt, s) for s in of(results, KERNELS)]


def _stages(plt, source: Result) -> Drawn:
    rows = [r for r in source.rows if "context" in r and BESIDE not in r["kernel"]]
    contexts = sorted({r["context"] for r in rows})
    names = [k for k in dict.fromkeys(r["kernel"] for r in rows if r["method"] != "full") if MISSES not in k]
    shades = {k: style.STAGES[i % len(style.STAGES)] for i, k in enumerate(names)}
    methods = list(dict.fromkeys(named(r) for r in rows))
    figure, panels = plt.subplots(
        len(contexts), 1, figsize=(8.6, (0.9 + 0.42 * len(methods)) * len(contexts)), squeeze=False
    )
    figure.subplots_adjust(hspace=0.75)
    for axes, context in zip(panels.flat, contexts):
        for y, method in enumerate(reversed(methods)):
            mine = {r["kernel"]: r["us"] for r in rows if (r["context"], named(r)) == (context, method)}
            _stage_bar(axes, y, mine, shades)
        axes.set_yticks(range(len(methods)), methods[::-1])
        axes.grid(axis="y", visible=False)
        axes.set_title(f"context {style.tokens(context)}")
    panels.flat[-1].set_xlabel("microseconds of one layer, in a CUDA graph")
    keys = [plt.Rectangle((0, 0), 1, 1, color=shade) for shade in shades.values()]
    below = (0.5, -0.2 / figure.get_figheight())  # inches, below the label of the axis
    figure.legend(keys, names, ncols=len(names), loc="upper center", bbox_to_anchor=below, fontsize=8.5, handlelength=1)
    budget, tokens = source.options["budget"], source.options.get("tokens", 100)
    note = (
        "Median of 9 replays; every call has inputs of its own, so nothing is cached from the call before. Hatched: "
        f"what the fetch takes longer if nearly every block is new. Budget: {budget} tokens per kv head and step, "
        f"{tokens} where single tokens are retrieved, beside sink and window."
        + (f" With {', '.join(source.options['hyper'])}." if source.options.get("hyper") else "")
    )
    return Drawn(figure, note, (source,))


def _stage_bar(axes, y: int, kernels: dict[str, float], shades: dict[str, str]) -> None:
    """The kernels of a step one after another; a method's only kernel that is no stage is dense attention."""
    left = 0.0
    for kernel, us in kernels.items():
        if MISSES not in kernel:
            shade = shades.get(kernel, style.colour("full"))
            axes.barh(y, us, left=left, height=0.62, color=shade, edgecolor="white", linewidth=0.8)
            left += us
    new = sum(us for kernel, us in kernels.items() if MISSES in kernel)
    if new:
        new -= sum(us for kernel, us in kernels.items() if kernel.startswith("fetch") and MISSES not in kernel)
        axes.barh(y, new, left=left, height=0.62, color="#fff7ef", edgecolor="#fdae6b", hatch="////", linewidth=0.6)
    axes.text(left + new, y, f"  {left:.0f} us" + (f", with new blocks {left + new:.0f}" if new else ""), va="center",
              fontsize=9)  # fmt: skip


# ---------------------------------------------------------------- prompts


def prefill(plt, results: list[Result]) -> list[Drawn]:
    return [_prefill(plt, s) for s in of(results, PREFILL)]


def _prefill(plt, source: Result) -> Drawn:
    figure, panels = plt.subplots(1, 2, figsize=(8.6, 0.9 + 0.35 * len(source.rows)))
    figure.subplots_adjust(wspace=0.25)
    labelled = [(f"{named(r)}, {style.tokens(r['context'])}", style.colour(r["method"]), r) for r in source.rows]
    for axes, (column, title, form) in zip(panels, PROMPT):
        style.bars(axes, [(label, r[column], shade) for label, shade, r in labelled], "", form)
        axes.set_title(title)
    panels[1].set_yticklabels([])
    note = (
        f"One prompt in one run, median of {source.options['repeats']}; dense: the unpatched model (SDPA, dynamic "
        "cache). Prompts are attended to exactly whatever the method, so a budget plays no part."
    )
    return Drawn(figure, note, (source,))


FIGURES = (
    Figure("tpot", "Time per token against context", "torchsparsekv bench decode", tpot),
    Figure("prefill", "Time to first token", "torchsparsekv bench prefill", prefill),
    Figure("throughput", "Throughput against batch", "torchsparsekv bench throughput", throughput),
    Figure("memory", "Memory against length", "torchsparsekv bench decode", memory),
    Figure("stages", "Latency of the stages of a decode step", "torchsparsekv bench kernels", stages),
)
