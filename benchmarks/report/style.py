"""The look of figures: one colour per method in all figures, names beside the lines, a light grid."""
import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

INK, SOFT, GRID = "#1f2430", "#6b7280", "#e6e8ec"
# Told apart with any colour vision; what is no retrieval method is grey.
METHODS = {
    "dense": "#1f2430", "full": "#1f2430", "quest": "#0072b2", "arkvale": "#009e73", "pariskv": "#d55e00",
    "oracle": "#8e4fb0", "streaming": "#b8860b", "prkv": "#c51b7d", "prkv_static": "#e69f00", "icecache": "#332288",
    "snapkv": "#999933", "pagemean": "#00a1d6", "omnikv": "#117733", "h2o": "#aa4499", "raas": "#882255",
    "pqcache": "#44aa99", "magicpig": "#cc6677", "shadowkv": "#661100",
    "retroinfer": "#6699cc",
    "random": "#8a8f98", "hf-static": "#b4b8c0",
    "sdpa-cudnn": "#6b7280", "sdpa-flash": "#9aa1ac", "flashinfer": "#c3c7ce",
}  # fmt: skip
OTHERS = ("#cc3a6f", "#56b4e9", "#7a8b00", "#a0522d", "#17a2a2")
STAGES = (
    "#c6dbef", "#9ecae1", "#4292c6", "#2171b5", "#fdae6b", "#084594", "#d9d9d9", "#bdbdbd", "#74c476", "#238b45",
)  # fmt: skip
HEAT = "YlGnBu"
DPI = 170  # of the pictures; the page shows an inch as 96 pixels, so letters have one size
LETTERS = 10  # points
RC = {
    "font.size": LETTERS, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": "#c3c7ce", "axes.labelcolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8, "text.color": INK,
    "xtick.color": SOFT, "ytick.color": SOFT, "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0,
    "lines.linewidth": 2.0, "lines.markersize": 5, "figure.facecolor": "white", "legend.frameon": False,
    "figure.max_open_warning": 0,
}  # fmt: skip


def pyplot():
    """matplotlib without a display, or an error that says how to get it."""
    try:
        import matplotlib
    except ModuleNotFoundError as e:
        raise RuntimeError("the report needs matplotlib: pip install 'torchsparsekv[report]'") from e
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def styled() -> Iterator[Any]:
    plt = pyplot()
    with plt.rc_context(RC):
        yield plt
    plt.close("all")


def colour(method: str) -> str:
    """The same for `quest`, `quest 128` and `pariskv max`; of an unknown method, by its name."""
    if method in METHODS:
        return METHODS[method]
    first = method.split()[0]
    return METHODS.get(first) or OTHERS[sum(map(ord, first)) % len(OTHERS)]


def tokens(n: float) -> str:
    """131072 as 128K, 1000000 as 1M."""
    for size, unit in ((1 << 20, "M"), (10**6, "M"), (1 << 10, "K"), (1000, "K")):
        if n >= size and n % size == 0:
            return f"{n / size:g}{unit}"
    return f"{n:g}"


def png(figure, **texts: str) -> bytes:
    """With a palette, which a figure's few colours fit into: a third of the bytes. `texts` are kept in the picture."""
    from PIL import Image, PngImagePlugin  # matplotlib needs it too

    drawn, out, said = io.BytesIO(), io.BytesIO(), PngImagePlugin.PngInfo()
    for name, text in texts.items():
        said.add_text(name, text)
    figure.savefig(drawn, format="png", dpi=DPI, bbox_inches="tight", pad_inches=0.12)
    Image.open(drawn).convert("RGB").quantize(256).save(out, format="png", optimize=True, pnginfo=said)
    return out.getvalue()


def name_lines(ax, ends: Sequence[tuple[float, float, str, str]], size: float = 9) -> None:
    """Names beside the last points: (x, y, name, colour) each, moved apart where they would lie on one another. To the
    right of them, or to the left where they would reach the next points that have names."""
    from matplotlib.patheffects import withStroke

    ax.figure.canvas.draw()  # so that data coordinates have their place
    columns: dict[float, list] = {}
    for x, y, name, shade in ends:
        right, height = ax.transData.transform((x, y))
        columns.setdefault(round(right), []).append((height, name, shade))
    back = ax.transData.inverted()
    for right, column in columns.items():
        reach = right + width(max((name for _, name, _ in column), key=len), size, ax)
        side, align = (-8, "right") if any(right < other < reach for other in columns) else (8, "left")
        column.sort(key=lambda c: c[0])
        heights = spread([y for y, _, _ in column], size * 1.25 * ax.figure.dpi / 72, ax.bbox.y0, ax.bbox.y1)
        for height, (_, name, shade) in zip(heights, column):
            x, y = back.transform((right + side, height))
            text = ax.text(x, y, name, color=shade, fontsize=size, va="center", ha=align, clip_on=False, zorder=5)
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])  # lines of others may pass under it


def width(text: str, size: float, ax) -> float:
    """About how many pixels it takes."""
    return 0.6 * len(text) * size * ax.figure.dpi / 72


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending heights, moved as little as may be (in squares) so that they are `gap` apart, and inside [low, high]
    where they fit: less their gaps they only have to ascend, and means over the pools that do not make them."""
    pools: list[list[float]] = []
    for i, height in enumerate(heights):
        pools.append([height - i * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    flat = [_mean(pool) for pool in pools for _ in pool]
    last = high - gap * (len(heights) - 1)
    if last >= low:
        flat = [min(max(y, low), last) for y in flat]
    return [y + i * gap for i, y in enumerate(flat)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def token_axis(ax, values, label: str) -> None:
    """A logarithmic axis with a tick for each value that there is, named where there is room beside the next."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log", base=2)
    octave = 0.9 * ax.bbox.width / max(1.0, math.log2(max(values) / min(values)))
    names: list[str] = []
    named = None
    for v in reversed(values):
        if named is None or math.log2(named / v) * octave > width(tokens(named), LETTERS, ax):
            named = v
        names.append(tokens(v) if named == v else "")
    ax.set_xticks(values, names[::-1])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(label)
    span = (values[-1] / values[0]) ** 0.08 if len(values) > 1 else 1.6
    ax.set_xlim(values[0] / span, values[-1] * span)


def bars(ax, rows: list[tuple[str, float, str]], unit: str, form: str) -> None:
    """(name, value, colour) each, the first on top, the values written beside them."""
    longest = max(value for _, value, _ in rows)
    for y, (_, value, shade) in enumerate(reversed(rows)):
        ax.barh(y, value, height=0.6, color=shade)
        ax.text(value + 0.012 * longest, y, format(value, form), va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.1 * longest)
    ax.set_ylim(-0.6, max(len(rows), 2) - 0.4)
    ax.set_xlabel(unit)


def heat(ax, grid, rows: list[str], columns: list[str], *, text: bool, low: float = 0.0, high: float = 1.0):
    """A grid of shares; None is blank."""
    import numpy as np

    values = np.array([[np.nan if x is None else x for x in row] for row in grid], float)
    image = ax.imshow(values, cmap=HEAT, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(False)
    ax.set_facecolor("#f3f4f6")
    for side in ax.spines.values():
        side.set_visible(False)
    for (i, j), x in np.ndenumerate(values):
        if text and not np.isnan(x):
            dark = (x - low) / (high - low) > 0.55
            ax.text(j, i, f"{x:.2f}", ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
    return image
