"""The measurement of IceCache's grouping and choice: what it compares is what it says."""
import argparse

import torch

from torchsparsekv.benchmarks.quality._recall import Stream
from torchsparsekv.benchmarks.quality.recall_icecache import Planted, measure

O = argparse.Namespace(r=1 / 16, levels=2, device="cpu", dtype=torch.float32, queries=6, views=[0.02, 0.5], top=32)


def planted() -> tuple[Stream, Planted]:
    stream = Stream(2048, 2048, heads=2, group=4, d=64)
    return stream, Planted(stream, 64, O)


def test_both_layouts_hold_the_keys_they_say():
    stream, tree = planted()
    by_row = stream.keys.gather(1, tree.token[..., None].expand(-1, -1, stream.d))
    assert torch.equal(tree.state.leaves.key[0, :, : tree.end], by_row)
    assert torch.equal(tree.in_token_order().key[0, :, : tree.end], stream.keys[:, : tree.end])
    assert not torch.equal(by_row, stream.keys[:, : tree.end])


def test_a_choice_comes_closer_to_the_exact_one_as_more_is_visited():
    stream, tree = planted()
    rows = {(row["pages"], row["field_of_view"]): row for row in measure(stream, tree, O)}
    few, some, exact = (rows["tree", share] for share in (0.02, 0.5, 1.0))
    assert exact["agrees"] == exact["visited"] == 1.0
    assert few["visited"] < some["visited"] < 0.8
    assert few["agrees"] < some["agrees"]
    assert some["agrees"] > 0.95
    assert rows["token order", 1.0]["recall"] > 0
