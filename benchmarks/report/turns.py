"""The figure of benchmarks/quality/turns.py: what LouisKV loses against how seldom it retrieves."""
from torchsparsekv_benchmarks.report.figures import Drawn, Figure, of
from torchsparsekv_benchmarks.report.load import TURNS, Result

PANELS = {
    "kl": "KL to dense, mean (nats)", "agrees": "top-1 agreement with dense", "mass": "attention weight kept",
}  # fmt: skip
WHAT = {"agrees": "top-1 agreement", "mass": "attention weight"}  # what is to be kept of it: one of these
KEEPS, SELDOM = 0.99, 0.3  # of what every step has, at so few of the steps: what the method is for
RULES = {
    "last step": ("#0072b2", "-", "cosine with the last step (the paper)"),
    "last retrieval": ("#d55e00", "-", "cosine with the last retrieval"),
    "last retrieval, per head": ("#c51b7d", "-", "with the last retrieval, each kv head for itself"),
    "mean since": ("#009e73", "-", "cosine with a mean since then"),
    "per head": ("#8e4fb0", "-", "the paper's, each kv head for itself"),
    "each layer its own tau": ("#b8860b", "-", "the paper's, equally often in every layer"),
    "every so many steps": ("#8a8f98", "--", "every 2, 4, 8 steps"),
}
TEXTS = {"prompt": "retrieved from a prompt", "own": "retrieved from its own text"}


def turns(plt, results: list[Result]) -> list[Drawn]:
    return [
        _drawn(plt, r, [x for x in r.rows if x["text"] == text], TEXTS[text])
        for r in of(results, TURNS)
        for text in dict.fromkeys(x["text"] for x in r.rows)
    ]


def _drawn(plt, source: Result, rows: list[dict], tag: str) -> Drawn:
    panels = {c: title for c, title in PANELS.items() if c in rows[0]}
    figure, (axes,) = plt.subplots(1, len(panels), figsize=(4.7 * len(panels) + 0.4, 3.4), squeeze=False)
    figure.subplots_adjust(wspace=0.25)
    for ax, (column, title) in zip(axes, panels.items()):
        for rule, (shade, dash, name) in RULES.items():
            points = sorted((r["retrieval_rate"], r[column], r["tau"]) for r in rows if r["rule"] == rule)
            if points:
                x, y, _ = zip(*points)
                ax.plot(x, y, color=shade, linestyle=dash, marker="o", linewidth=1.4, label=name)
            for at, value, tau in points if rule == "last step" else ():
                ax.annotate(f"{tau:g}", (at, value), (3, 5), textcoords="offset points", fontsize=7.5, color=shade)
        if column == "kl":
            ax.set_yscale("log")
        ax.set_xlim(0, 1.05)
        ax.set_xlabel("share of the steps that retrieve")
        ax.set_title(title)
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Drawn(figure, _caption(source, rows), (source,), tag)


def _caption(source: Result, rows: list[dict]) -> str:
    r, o = rows[0], source.options
    if r["text"] == "prompt":
        what = f"{r['length'] - r['scored']} tokens of prompt, then {r['scored']} true ones"
        near = "beside 32 sink and 64 latest tokens"
    else:
        what = (
            f"{o['own_prompt']} tokens of prompt, then {o['own']} that the dense model wrote, the last {r['scored']} "
            "of them scored"
        )
        near = "beside 4 sink and 32 latest tokens"
    by = "one dense forward's queries and keys" if "mass" in r else "decoding through the method"
    return (
        f"louiskv, by {by}: {r['samples']} samples of {what}; numbers at the points: tau. Budget: {r['budget']} tokens "
        f"retrieved per kv head and step, {near}; 2 dense layers. {verdict(rows)}"
    )


def verdict(rows: list[dict]) -> str:
    """Which rule retrieves least of those that keep what every step has."""
    measure = next(m for m in WHAT if m in rows[0])
    every = [r for r in rows if r["tau"] == 1.0 and r["rule"] == "last step"]
    if not every:
        return "What retrieving at every step has was not measured."
    least = KEEPS * every[0][measure]
    best = min((r for r in rows if r["rule"] in RULES and r[measure] >= least), key=lambda r: r["retrieval_rate"])
    at = f"tau {best['tau']:g}" if best["tau"] is not None else f"stride {best['stride']}"
    none = "" if best["retrieval_rate"] <= SELDOM else f" So none does at {SELDOM:.0%} of the steps or fewer."
    return (
        f"Of those with at least {KEEPS:.0%} of the {WHAT[measure]} of retrieving at every step "
        f"({every[0][measure]:.3f}), the one that retrieves least is: {best['rule']}, {at}, at "
        f"{best['retrieval_rate']:.0%} of the steps.{none}"
    )


TITLE = "LouisKV: quality against how often it retrieves"
FIGURES = (Figure("turns", TITLE, "python benchmarks/quality/turns.py", turns),)
