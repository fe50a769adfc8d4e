"""What docs/results.md and the page of icecache say of its time on an H200."""
from test_cli import ROOT
from test_measured_h100 import said
from test_measured_pages import kl_of, rows_of, stages_of
from test_results import tables

from torchsparsekv._methods.icecache import MANY_NODES

IN_RING, FAR = "128k_sample_h200", "512k_sample_cpu"


def test_icecache_since():
    found, names = [], {"full": "dense: ours", "icecache": "icecache"}
    for at, name in (("36K", "icecache_36k"), ("128K", "icecache"), ("512K", "icecache_512k")):
        for r in rows_of(f"h200_decode_{name}.json")[1:]:
            assert not any(r[x] for x in ("recompiles", "graph_skips", "memory_growth"))
            what = names[r["method"]] + (f"`, `{r['hyper']}" if r.get("hyper") else "")
            times = [*(f"{r[x]:.2f}" for x in ("tpot_ms", "p99_ms", "over_floor")), f"{r['speedup']:.2f}x"]
            dense = r["method"] == "full"
            kept = ["" if dense else f"{r['hit_rate']:.2f}", f"{r['device_GiB']:.1f}"]
            found.append([at, what, *times, *kept, "" if dense else f"{r['host_GiB']:.1f}"])
    assert found in tables(ROOT / "docs/results.md")


def test_steps_of_icecache():
    want = []
    for at, name in (("36K", "icecache_36k"), ("128K", "icecache"), ("512K", "icecache_512k")):
        _, dense, *found = rows_of(f"h200_decode_{name}.json")
        cells = [[f"{r['tpot_ms']:.2f}", f"{r['over_floor']:.2f}"] for r in found]
        want.append([at, *cells[0], f"{dense['tpot_ms']:.2f}", *(cells[1] if found[1:] else ["", ""])])
    assert want in tables(ROOT / "docs/methods/icecache.md")


def test_a_step_with_layers_that_were_found():
    _, dense, whole, third, found = rows_of("h200_decode_icecache.json")
    assert found["hyper"] == "selecting_layers=choosers_smollm2.json"
    assert not any(found[x] for x in ("recompiles", "graph_skips", "memory_growth"))
    told = (found, third, whole, dense)
    text = "takes {:.2f} ms, {over:.2f} of the floor, where it takes {:.2f} with `reuse_every=3` and {:.2f} without "
    text += "reuse, our dense attention {:.2f}"
    page = said("docs/methods/icecache.md")
    assert text.format(*(r["tpot_ms"] for r in told), over=found["over_floor"]) in page
    assert found["over_floor"] < 1.08


def test_steps_after_a_prompt_in_chunks():
    page, results = said("docs/methods/icecache.md"), said("docs/results.md")
    near, far = (rows_of(f"earlier/h200_decode_icecache_{name}chunks.json")[2] for name in ("", "512k_"))
    assert not any("hyper" in r for r in (near, far))
    told = near["tpot_ms"], near["over_floor"], far["tpot_ms"], far["over_floor"]
    assert "at 128K took {:.2f} ms, {:.2f} of its floor, and at 512K {:.2f}, {:.2f}".format(*told) in page
    text = "takes longer**, {:.2f} and {:.2f} ms, {:.2f} and {:.2f} of the floor"
    assert text.format(*told[::2], *told[1::2]) in results


def test_the_goals_of_icecache():
    page, (_, _, found, third, chosen) = said("docs/methods/icecache.md"), rows_of("h200_decode_icecache.json")
    far = rows_of("h200_decode_icecache_512k.json")[2]
    near, at = (stages_of("h200_kernels_icecache.json", kind, 131072) for kind in ("icecache", "full"))
    beyond = stages_of("h200_kernels_icecache.json", "full", 524288)
    dense = [2 * x["dense attention"]["us"] / 1e3 for x in (at, beyond)]
    assert "which takes {:.2f} ms at 128K and {:.2f} at 512K".format(*dense) in page
    assert f"at 128K with {found['over_floor']:.3f} in one run, at 512K with {far['over_floor']:.3f} in one run" in page
    assert found["over_floor"] <= 1.12
    assert far["over_floor"] <= 1.4
    assert max(r["over_floor"] for r in (third, chosen)) <= 1.08
    recall = recall_at(IN_RING, 640)
    assert f"{recall:.3f} of the best tokens are found" in page
    assert near["select, all of it (beside)"]["us"] <= 20
    assert recall >= 0.88


def recall_at(where: str, nodes: int, budget: int = 1024) -> float:
    """Of keys that are made up, by codes of the tree's pages."""
    rows = rows_of(f"quality/icecache/structured_{where}.json")
    near = [r for r in rows if abs(r["field_of_view"] * r["context"] / 16 - nodes) < 4]
    (found,) = (r for r in near if r["choice"] == "codes" and r["budget"] == budget)
    return found["recall"]


def test_what_more_nodes_find_icecache():
    assert MANY_NODES == 640
    text = "at 128K with 1024 tokens {:.3f} of a query's 32 best are found, and {:.3f} with 512 nodes, where the "
    text += "default stopped before; with 256 tokens {:.3f} with either"
    told = recall_at(IN_RING, MANY_NODES), recall_at(IN_RING, 512), recall_at(IN_RING, 512, 256)
    assert text.format(*told) in said("docs/methods/icecache.md")
    assert f"{told[2]:.3f}" == f"{recall_at(IN_RING, MANY_NODES, 256):.3f}"
    far = recall_at(FAR, MANY_NODES), recall_at(FAR, 512)
    assert "at 512K {:.3f} and {:.3f}, of two heads and four queries".format(*far) in said("docs/methods/icecache.md")


def test_what_choosing_takes_icecache_on_an_h200():
    page = said("docs/methods/icecache.md")
    near, far = (stages_of("h200_kernels_icecache.json", "icecache", n) for n in (131072, 524288))
    for kernel, text in (
        ("select, all of it (beside)", "is choosing: {:.1f} us a layer at 128K and {:.1f} at 512K on an H200"),
        ("expanding nodes", "expanding nodes {:.1f} and {:.1f}, ranking"),
        ("ranking pages", "ranking pages {:.1f} and {:.1f}, the best"),
        ("best pages by turns", "the best of these by turns of the query heads {:.1f} and {:.1f}"),
    ):  # fmt: skip
        assert text.format(near[kernel]["us"], far[kernel]["us"]) in page


def test_what_insertion_takes_icecache():
    """Of 32 layers two are dense, and a page of 16 tokens leaves at every 16th step."""
    page, times, longer, shares = said("docs/methods/icecache.md"), [], [], []
    for context, name in ((131072, "icecache"), (524288, "icecache_512k")):
        at = stages_of("h200_kernels_icecache.json", "icecache", context)
        leaves, still = (at[f"index update ({what})"]["us"] for what in ("a page leaves", "nothing leaves"))
        step = next(r["tpot_ms"] for r in rows_of(f"h200_decode_{name}.json") if r["method"] == "icecache")
        times.append(leaves)
        longer.append(30 * (leaves - still) / 1e3)
        shares.append(longer[-1] / 16 / step * 100)
    assert "in all layers: {:.1f} us a layer at 128K, {:.1f} at 512K, where".format(*times) in page
    assert "with insertions takes {:.1f} ms more at 128K and {:.1f} at 512K".format(*longer) in page
    assert "it is {:.1f} % and {:.1f} % of their time".format(*shares) in page
    assert max(shares) < 2


def test_what_choosing_takes_icecache_where_there_is_little_to_read():
    choosing = "select, all of it (beside)"
    at = [stages_of("h100/kernels_icecache_short.json", "icecache", n)[choosing]["us"] for n in (131072, 4096)]
    few = stages_of("h100/kernels_icecache_64_nodes.json", "icecache", 131072)[choosing]["us"]
    text = "choosing took {:.1f} us at 128K, it took {:.1f} at 4,096 tokens, and at 128K {:.1f} with 64 nodes"
    assert text.format(*at, few) in said("docs/methods/icecache.md")


def test_the_first_token_of_icecache():
    rows = [r for r in rows_of("h200_prefill_icecache.json") if r["method"] == "icecache"]
    own, reuse = ([f"{r['over_dense']:.3f}" for r in rows if ("hyper" in r) == more] for more in (False, True))
    text = "The first token comes {} and {} times as late as from the unpatched model, at 32K and 64K, and with "
    text += "`reuse_every=3`, heads being matched, {} and {}"
    assert text.format(*own, *reuse) in said("docs/methods/icecache.md")


def test_what_the_first_nodes_change_of_a_prompt():
    now, before = ([kl_of(f"icecache/text_2048_{name}_cpu.jsonl", "icecache", b) for b in (64, 256)]
                   for name in ("always", "nodes8"))  # fmt: skip
    text = "the KL is {:.4f} at 64 tokens and {:.4f} at 256, and was {:.4f} and {:.4f}"
    assert text.format(*now, *before) in said("docs/methods/icecache.md")


def test_what_it_loses_of_a_text_beside_clusterkv():
    page, over = said("docs/methods/icecache.md"), "{:.2f} and {:.2f} times as much"
    now, before = ([kl_of(f"icecache/text_2048_{kind}_{b}_cpu.jsonl", "icecache", b) for b in (64, 256)]
                   for kind in ("always", "nodes8"))  # fmt: skip
    theirs = [kl_of("text/text_2048_h200.jsonl", "clusterkv", b) for b in (64, 256)]
    text = "has {:.4f} at 64 tokens and {:.4f} at 256, where `clusterkv` has {:.4f} and {:.4f} on a GPU: " + over
    assert text.format(*now, *theirs, *(a / b for a, b in zip(now, theirs))) in page
    text = "it was {:.4f} and {:.4f}, " + over
    assert text.format(*before, *(a / b for a, b in zip(before, theirs))) in page
    assert all(a <= 1.1 * b for a, b in zip(now, theirs))
    quality = said("docs/quality.md")
    text = "and as it is today {:.4f} at 64 tokens and {:.4f} at 256, {:.2f} and {:.2f} times"
    assert text.format(*now, *(a / b for a, b in zip(now, theirs))) in quality
