"""Attention mass that PRKV keeps by its static share, beside ArkVale, SnapKV and the oracle, on the recall model.

    python benchmarks/quality/static_mass.py --lengths 4096 --budgets 64 256 --samples 2

Of every share (`auto` included, whose shares by layer are given), the mean over sparse layers, steps and query heads of
the softmax weight that was attended to while the answers of `--task` are decoded. The oracle chooses single tokens by
their true weights. `journal` is the long generation.
"""
import argparse
from pathlib import Path

import torch

import torchsparsekv
from torchsparsekv.benchmarks import _results
from torchsparsekv.benchmarks.quality.options import Options
from torchsparsekv.benchmarks.quality.sources import load
from torchsparsekv.probe import probe

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")


def settings(block_size: int, every: int) -> dict[str, tuple[str, dict]]:
    """(method, hyper-parameters) by label."""
    pages = dict(block_size=block_size)
    shares = {f"prkv {s}": ("prkv", dict(pages, static_ratio=s, update_every=every)) for s in SHARES}
    snap = {"snapkv": ("snapkv", {}), "snapkv updated": ("snapkv", dict(update_every=every))}
    return {**shares, "arkvale": ("arkvale", pages), "quest": ("quest", pages), **snap, "oracle": ("oracle", {})}


@torch.no_grad()
def kept(model, sample, method: str, hyper: dict, o: argparse.Namespace, length: int) -> tuple[float, list[float]]:
    """The mass that was kept, and the static share of each sparse layer."""
    steps = min(sample.new_tokens, o.steps)
    ids = torch.tensor([sample.prompt], device=model.device)
    common = dict(sink=o.sink, window=o.window, skip_layers=2, max_length=length)
    with torchsparsekv.patch(model, method, **common, **hyper) as handle:
        cache = handle.make_cache(1, length)
        with probe(cache) as seen:
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
                temperature=None, top_p=None, top_k=None, past_key_values=cache, disable_compile=True,
            )  # fmt: skip
            mass = float(seen.mass()[seen.sparse()].mean())
        shares = [r.static_share for r in handle.report().layers]
    return mass, [s for s in shares if s is not None]


def rows(o: argparse.Namespace):
    source = load(Options(device=o.device))
    for length in o.lengths:
        for budget in o.budgets:
            for label, (method, hyper) in settings(o.block_size, o.update_every).items():
                found = [
                    kept(source.model, source.sample(o.task, length, i), method, dict(hyper, budget=budget), o, length)
                    for i in range(o.samples)
                ]
                mass = sum(m for m, _ in found) / len(found)
                layers = [round(sum(x) / len(x), 4) for x in zip(*(s for _, s in found))]
                row = {"task": o.task, "length": length, "budget": budget, "method": label, "mass": round(mass, 4)}
                print(row, layers, flush=True)
                yield row | {"static_shares": layers}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", default="multivalue")
    p.add_argument("--lengths", type=int, nargs="+", default=[4096])
    p.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048])
    p.add_argument("--samples", type=int, default=2)
    p.add_argument("--steps", type=int, default=512, help="tokens that are generated, at most")
    p.add_argument("--block-size", type=int, default=16)
    p.add_argument("--update-every", type=int, default=128)
    p.add_argument("--sink", type=int, default=32)
    p.add_argument("--window", type=int, default=64)
    p.add_argument("--device", default="auto")
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    given = {k: v for k, v in vars(o).items() if k != "out"}
    _results.finish("static_mass", list(rows(o)), given, o.out)


if __name__ == "__main__":
    main()
