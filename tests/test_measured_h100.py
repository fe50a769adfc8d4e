"""What the pages say of an H100 is in its files."""
from test_cli import ROOT
from test_measured_pages import rows_of, stages_of


def said(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_prkv_beside_dense():
    floor, dense, often, once = rows_of("h100/decode_prkv.json")
    ms, without, over = often["tpot_ms"], once["tpot_ms"], often["tpot_ms"] / floor["tpot_ms"]
    text = f"{ms:.2f} ms with updates, {over:.2f} of its floor of {floor['tpot_ms']:.2f}, and {without:.2f} without"
    text += f", the 99th percentile {often['p99_ms']:.2f} and {once['p99_ms']:.2f}; our dense {dense['tpot_ms']:.2f}"
    assert text in said("docs/results.md")
    text = f"{over:.2f} of a step over 256 tokens and {often['speedup']:.2f} times as fast as our dense attention "
    page = said("docs/methods/prkv.md")
    assert f"{ms:.2f} ms at 131072 tokens with its updates, {text}({dense['tpot_ms']:.2f}); {without:.2f} ms" in page


def test_what_a_static_set_costs_where_nothing_is_due():
    ours = {k: r["us"] for k, r in stages_of("h100/kernels_prkv.json", "prkv", 131072).items()}
    whole, without = ours["select, all of it (beside)"], ours["digests and pages, no static set (beside)"]
    page = said("docs/methods/prkv.md")
    assert f"**A static set costs {whole - without:.2f} us a layer on such a step**, on an H100" in page
    assert f"take {whole:.2f} us one after the other, digests and pages without a static set {without:.2f} " in page
    alone = stages_of("h100/kernels_prkv.json", "arkvale", 131072)["index update (nothing leaves)"]["us"]
    launch = ours["update of the static set (nothing due)"]
    assert f"takes {launch:.2f} us by itself; `arkvale`'s, which has digests alone to look for, {alone:.2f}." in page
