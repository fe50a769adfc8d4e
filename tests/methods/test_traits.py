"""What the engine must know of a method beyond its hooks: said once, and there before a step is compiled."""
from dataclasses import dataclass, fields
from functools import cached_property

import pytest
from models import tiny

import torchsparsekv
from torchsparsekv.method import Method, Traits, all_methods, layer_method, make_method, traits_of

ATTENDS = {"full": "everything", "streaming": "recent"}


@pytest.mark.parametrize("name", all_methods())
def test_what_a_method_attends_to(name):
    assert make_method(name).traits.attends == ATTENDS.get(name, "selected")


def test_the_method_of_window_layers_is_not_offered():
    assert layer_method("window", window=8).traits.attends == "window"
    assert "window" not in all_methods()
    with pytest.raises(ValueError, match="unknown method 'window'"):
        make_method("window")


@pytest.mark.parametrize(
    ("name", "hyper", "trait", "value"),
    [
        ("louiskv", {}, "couples_heads", True),
        ("louiskv", dict(per_head=True), "couples_heads", False),
        ("prkv", dict(static_ratio="auto"), "couples_heads", True),
        ("prkv", dict(static_ratio="auto", per_head=True), "couples_heads", False),
        ("prkv", {}, "selects_every_step", True),
        ("prkv", {}, "moves_selected", True),
        ("prkv", dict(static_ratio=0), "moves_selected", False),
        ("clusterkv", {}, "selects_every_step", True),
        ("clusterkv", dict(run=4), "selects_every_step", False),
        ("quest", {}, "least_capability", (8, 9)),
        ("quest", dict(digest="bfloat16"), "least_capability", (8, 0)),
        ("prkv", dict(digest="bfloat16"), "least_capability", (8, 9)),
        ("prkv", dict(digest="bfloat16"), "older_devices", 'update_from="keys"'),
        ("prkv", dict(update_from="keys"), "older_devices", 'digest="bfloat16"'),
        ("prkv", dict(digest="bfloat16", update_from="keys"), "least_capability", (8, 0)),
        ("prkv_static", dict(update_every=8), "least_capability", (8, 9)),
        ("omnikv", {}, "couples_heads", True),
        ("arkvale", {}, "couples_heads", False),
        ("arkvale", dict(group="layer"), "couples_heads", True),
        ("arkvale", dict(group="layer"), "no_engine", "selects for all heads of a layer"),
        ("icecache", {}, "partial_blocks", True),
        ("icecache", {}, "reorders_pool", True),
    ],
)
def test_traits_follow_hyper_parameters(name, hyper, trait, value):
    assert getattr(make_method(name, **hyper).traits, trait) == value


@pytest.mark.parametrize("name", all_methods())
def test_traits_are_plain_attributes_of_every_method_that_a_plan_holds(name):
    """torch 2.11 and 2.13 cannot trace a cached property that has no value yet."""
    assert "traits" in vars(make_method(name))
    with torchsparsekv.patch(tiny(), name) as handle:
        methods = [m for m in handle.planned.methods if m is not None]
        assert all({"traits", "_attends", "rest"} <= vars(m).keys() for m in methods)
        assert all(m == type(m)(**{f.name: getattr(m, f.name) for f in fields(m)}) for m in methods), "no field"


def test_traits_of_another_type_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class _Wrong(Method):
        name = "wrong_traits_for_a_test"

        @cached_property
        def traits(self):
            return {"attends": "selected"}

    with pytest.raises(TypeError, match="wrong_traits_for_a_test: traits must be a Traits, got "):
        traits_of(_Wrong())
    assert Traits().attends == "selected"


def test_layers_of_a_method_share_no_selection_by_default():
    quest, icecache = make_method("quest"), make_method("icecache", reuse_every=3)
    assert type(quest).shares_selection(dict.fromkeys(range(4), (quest, 2, 8))) == {}
    layers = {i: (icecache, 2 if i != 3 else 4, 8) for i in range(6)}
    assert type(icecache).shares_selection(layers) == {1: 0, 2: 0, 5: 4}
