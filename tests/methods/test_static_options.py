"""Options of methods with a static set: defaults, rounding and refusals."""
import re

import pytest
import torch
from layer import PAGES, SMALL
from models import tiny

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.state import Geometry


@pytest.mark.parametrize(
    ("name", "hyper", "error", "says"),
    [
        ("prkv", dict(static_ratio=1.5), ValueError, 'prkv: static_ratio must be in [0, 1] or "auto", got 1.5'),
        ("prkv", dict(static_ratio=-0.1), ValueError, 'prkv: static_ratio must be in [0, 1] or "auto", got -0.1'),
        ("prkv", dict(static_ratio="half"), ValueError, "prkv: static_ratio must be in [0, 1] or \"auto\", got 'half'"),
        ("prkv", dict(static_ratio=float("nan")), ValueError,
         'prkv: static_ratio must be in [0, 1] or "auto", got nan'),
        ("prkv", dict(per_head=1), TypeError, "prkv: per_head must be a bool, got 1"),
        ("prkv", dict(update_every=0), ValueError, "prkv: update_every must be from 1 to 2147483646, got 0"),
        ("prkv_static", dict(update_every=-3), ValueError,
         "prkv_static: update_every must be from 1 to 2147483646, got -3"),
        ("prkv_static", dict(observe=0), ValueError, "prkv_static: observe must be at least 1, got 0"),
        ("prkv", dict(update_from="disk"), ValueError, "prkv: update_from must be one of keys, codes, got 'disk'"),
        ("prkv", dict(observe=7, window=6), ValueError,
         "prkv: observe 7 is above window 6: tokens would be scored by queries that came before them"),
    ],
)  # fmt: skip
def test_wrong_hyper_parameters_are_refused(name, hyper, error, says):
    with pytest.raises(error, match=f"^{re.escape(says)}$"):
        make_method(name, **hyper)


def test_tensor_parallel_ranks_need_per_head():
    model = tiny()
    model._tp_size = 2
    with pytest.raises(NotImplementedError, match="pass per_head=True"):
        torchsparsekv.patch(model, "prkv", static_ratio="auto", max_length=64)
    with torchsparsekv.patch(model, "prkv", static_ratio="auto", per_head=True, max_length=64) as handle:
        assert handle.planned.method.per_head


def test_static_ratio_is_rounded_to_whole_pages():
    for ratio, tokens in ((0.25, 256), (0.26, 256), (0.99, 992), (1, 1024), (0.03, 0), (0.29, 288)):
        method = make_method("prkv", static_ratio=ratio)
        assert method.effective()["static"] == method.static == tokens
    assert make_method("prkv", budget=320, static_ratio=0.3).static == 96, "and not a page less by rounding"


def test_defaults_are_the_published_ones():
    method = make_method("prkv")
    got = method.block_size, method.update_every, method.static_ratio, method.shape, method.observed
    assert got == (32, 128, 0.25, "mean-box", 64)
    assert make_method("prkv_static").update_every is None


def test_static_set_is_capped_by_the_pool():
    g = Geometry(1, 2, 16, 64, torch.float32)
    assert make_method("prkv_static", **SMALL, budget=500).buffers(g)["static"].ids.shape == (1, 2, 64)
    assert make_method("prkv", **PAGES, budget=400, static_ratio=0.5).buffers(g)["static"].ids.shape == (1, 2, 64)
