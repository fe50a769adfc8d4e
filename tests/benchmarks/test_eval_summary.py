"""The statistics of the evaluation, against known values."""
import math
import random
import statistics

import pytest

from torchsparsekv_benchmarks.quality import summary

KNOWN = [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)]


@pytest.mark.parametrize(("right", "n", "low", "high"), KNOWN)
def test_wilson(right, n, low, high):
    """Known values: the rule of an unseen event, its mirror, and a worked example of the method's literature."""
    assert summary.wilson(right / n, n) == pytest.approx((low, high), abs=6e-4)


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0])
def test_wilson_never_leaves_the_mean_outside(mean):
    """As rounding did with 11 wrong samples or 12 right ones; figures refuse such a span."""
    for n in range(1, 300):
        low, high = summary.wilson(mean, n)
        assert 0 <= low <= mean <= high <= 1


def test_bootstrap_covers_the_mean():
    values = [0.0] * 30 + [1.0] * 10
    low, high = summary.bootstrap(values)
    assert low < 0.25 < high
    half = 1.96 * math.sqrt(0.25 * 0.75 / 40)
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    assert summary.bootstrap([0.5] * 5) == (0.5, 0.5)
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=40)) for _ in range(2000))
    assert (low, high) == (means[50], means[1949]), "as many as there are, with replacement"


def test_losses_are_paired():
    rows = [
        {"task": "t", "length": 1, "index": i, "method": m, "budget": b, "score": s, "density": None, "hit_rate": None,
         "bytes_per_token": None, "seconds": 0.0, "mass": None, "error": None}
        for m, b, scores in (("dense", None, (1, 0, 1, 1)), ("quest", 8, (1, 0, 0, 1)))
        for i, s in enumerate(scores)
    ]  # fmt: skip
    dense, quest = summary.summarize(rows, "dense")
    assert "loss" not in dense
    assert quest["loss"] == 0.25
    assert quest["loss_low"] == 0, "no sample is better than dense, so the interval does not reach below"
