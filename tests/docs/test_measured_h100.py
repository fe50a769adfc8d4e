"""What the pages say of an H100 is in its files."""
from test_cli import ROOT
from test_measured_pages import rows_of, stages_of
from test_results import tables


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


def test_packed_rows_in_whole_lines():
    text, told = said("docs/results.md"), []
    for name in ("kernels_int8", "kernels_int8_before"):
        rows = stages_of(f"h100/{name}.json", "quest", 32768)
        link = stages_of(f"h100/{name}.json", "torchsparsekv", 32768) | stages_of(f"h100/{name}.json", "torch", 32768)
        fetch = rows["fetch, nearly all misses"]
        told += [fetch["us"], fetch["GB_per_s"] / link["read of pinned host memory"]["GB_per_s"]]
    one = "nearly all new: {:.1f} us, {:.2f} of the rate that its process measured of the link, "
    assert (one + "instead of {:.1f} and {:.2f} ").format(*told) in text
    floor, dense, _, there, half, new = rows_of("h100/decode_int8.json")
    assert [r["locality"] for r in (there, half, new)] == [1, 0.5, 0]
    ms = [r["tpot_ms"] for r in (floor, dense, there, half, new)]
    step = "floor {:.2f} ms, our dense {:.2f}: {:.2f} ms where all is there, {:.2f} at hits of one half, "
    assert step.format(*ms[:4]) + f"{ms[4]:.2f} where all is new, {ms[4] / ms[0]:.2f} of the floor" in text


def test_what_an_option_of_the_compiler_saves():
    page, ms = said("docs/results.md"), {}
    for option, name in (
        ("as it is", "untuned"), ("`coordinate_descent_tuning`", "tuned"), ("`max_autotune_gemm`", "max_autotune"),
    ):  # fmt: skip
        floor, *dense, quest = rows_of(f"h100/decode_{name}.json")
        assert quest["method"] == "quest"
        assert all(r["method"] == "full" for r in dense)
        told = [f"{floor['tpot_ms']:.2f}", *(f"{r['tpot_ms']:.2f}" for r in dense), f"{quest['tpot_ms']:.2f}"]
        told.append(f"{quest['tpot_ms'] / floor['tpot_ms']:.2f}")
        ms[name] = [r["tpot_ms"] for r in (quest, *dense, floor)]
        if dense:
            told.append(f"{dense[0]['tpot_ms'] / quest['tpot_ms']:.2f}x")
            assert f"| {option} | {' | '.join(told)} |" in page
        else:
            assert f"| {option} | {told[0]} | | {told[1]} | {told[2]} | |" in page
    less = [a - b for a, b in zip(ms["untuned"], ms["tuned"])]
    assert "`quest` takes {:.2f} ms less and dense attention {:.2f}, the floor {:.2f}".format(*less) in page


def test_icecache_and_2m():
    floor, dense, now, tenth = rows_of("h100/decode_icecache.json")
    told = (now["tpot_ms"], now["over_floor"], floor["tpot_ms"], now["speedup"], dense["tpot_ms"], tenth["tpot_ms"])
    text = "took {:.2f} ms, {:.2f} of what a step over 256 tokens takes ({:.2f}) and {:.2f} times as fast as our dense "
    text += "attention in the same run ({:.2f}); with a tenth of the nodes expanded, as it was before, {:.2f}"
    assert text.format(*told) in said("docs/methods/icecache.md")
    assert f"a step at 128K took {now['over_floor']:.2f} of the floor" in said("docs/results.md")
    floor, quest = rows_of("h100/decode_2m.json")
    told = quest["tpot_ms"], quest["over_floor"], floor["tpot_ms"], quest["host_GiB"], quest["device_GiB"]
    text = "{:.2f} ms, {:.2f} of its {:.2f}, with {:.1f} GiB on the host and {:.1f} on the GPU"
    assert text.format(*told) in said("docs/results.md")


def test_what_choosing_takes_icecache():
    page, choosing = said("docs/methods/icecache.md"), "select, all of it (beside)"
    told = []
    for name in ("kernels_icecache", "kernels_icecache_tenth"):
        near, far = (stages_of(f"h100/{name}.json", "icecache", n) for n in (131072, 524288))
        told += [near[choosing]["us"], far[choosing]["us"]]
    text = "choosing took {:.1f} us a layer at 128K and {:.0f} at 512K, or with a tenth of the nodes {:.1f} and {:.0f} "
    assert text.format(*told) in page
    near, far = (stages_of("h100/kernels_icecache.json", "icecache", n) for n in (131072, 524288))
    for kernel, words in (
        ("expanding nodes", "expanding nodes"), ("ranking pages", "ranking pages"), ("top pages", "the best of these"),
        ("their union", "their union"),
    ):  # fmt: skip
        assert f"{words} {near[kernel]['us']:.1f} and {far[kernel]['us']:.1f}" in page


def test_what_may_come_late():
    """Rows of the table, and what is said beside it."""
    page, want = said("docs/results.md"), []
    wide, packed = rows_of("h100/decode_late.json"), rows_of("h100/decode_late_int8.json")
    late = "prefetch_async=0.8"
    for pool, rows, hyper in (("16 bits", wide, None), ("16 bits", wide, late), ("int8", packed, late)):
        ms = {r["locality"]: r["tpot_ms"] for r in rows if r["method"] == "quest" and r.get("hyper") == hyper}
        told = [pool, hyper.partition("=")[2] if hyper else "none", *(f"{ms[x]:.2f}" for x in (1, 0.5, 0))]
        want.append([*told, f"{ms[0.5] / ms[1]:.2f}", f"{ms[0] / rows[0]['tpot_ms']:.2f}"])
    assert want in tables(ROOT / "docs/results.md")
    plain, late = ([r for r in wide if r["method"] == "quest" and r.get("hyper") == x] for x in (None, late))
    text = "floor {:.2f} ms, our dense {:.2f}. Of the jumps to another topic four in ten turn the query"
    assert text.format(wide[0]["tpot_ms"], wide[1]["tpot_ms"]) in page
    assert f"so that {late[2]['fetched_late']:.2f} to {late[1]['fetched_late']:.2f} of the traffic is late" in page
    assert f"floor {packed[0]['tpot_ms']:.2f}, dense {packed[1]['tpot_ms']:.2f})" in page
    assert f"{late[1]['p99_ms']:.2f} ms with it, {plain[1]['p99_ms']:.2f} without" in page
    assert f"it costs {late[0]['tpot_ms'] - plain[0]['tpot_ms']:.2f} ms" in page
