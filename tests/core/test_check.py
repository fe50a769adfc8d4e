"""check_method: every method of the library passes, and each broken promise is found."""
import dataclasses

import pytest
import torch

import torchsparsekv
from torchsparsekv._methods.quest import Quest
from torchsparsekv.ops.store.views import Selection

SIZES = dict(sink=4, window=8)
PAGES = dict(SIZES, block_size=4)
SMALL = {
    "arkvale": PAGES,
    "clusterkv": dict(SIZES, budget=16, every=16, new_clusters=2, cluster_size=8, rounds=4),
    "h2o": dict(budget=16, window=8),
    "icecache": dict(SIZES, page_size=4),
    "louiskv": dict(SIZES, budget=64),
    "omnikv": SIZES,
    "magicpig": dict(SIZES, budget=16, bits=3, tables=20),
    "oracle": SIZES,
    "pariskv": dict(SIZES, budget=16, update_interval=4, full_threshold=0),
    "pqcache": dict(SIZES, budget=16, bits=3),
    "prkv": PAGES,
    "prkv_static": dict(SIZES, budget=16),
    "pagemean": PAGES,
    "quest": PAGES,
    "raas": PAGES,
    "random": PAGES,
    "retroinfer": dict(SIZES, budget=16, every=16, new_clusters=2, cluster_size=8, rounds=4, estimated=0.0),
    "shadowkv": dict(PAGES, outliers=2),
    "snapkv": dict(budget=16, window=24),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_retrieving_method_passes(name):
    assert len(torchsparsekv.check_method(name, **SMALL[name])) == 4


@pytest.mark.parametrize("name", ["full", "streaming"])
def test_a_method_that_selects_nothing_has_nothing_to_check(name):
    assert torchsparsekv.check_method(name) == [f"{name} selects nothing: there is nothing to check"]


def broken(**changed):
    """Quest with other hooks; it has no name of its own, so nobody can choose it."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(type("Broken", (Quest,), changed))


def shifted(by: int):
    def choose(self, s, q, a):
        ids = Quest.choose(self, s, q, a).ids
        return Selection(torch.where(ids < 0, ids, ids + by))

    return choose


def the_sinks(self, s, q, a):
    ids = Quest.choose(self, s, q, a).ids.clone()
    ids[..., 0] = 0
    return Selection(ids)


def twice(self, s, q, a):
    ids = Quest.choose(self, s, q, a).ids.clone()
    ids[..., 1] = ids[..., 0]
    return Selection(ids)


def fewer_in_a_batch(self, s, q, a):
    """A row of a batch gets a block less than the row alone."""
    ids = Quest.choose(self, s, q, a).ids.clone()
    if len(ids) > 1:
        ids[..., 0] = -1
    return Selection(ids)


def one_block_less(self, s, q, a):
    ids = Quest.choose(self, s, q, a).ids.clone()
    ids[..., 0] = -1
    return Selection(ids)


def one_block_less_after_a_second_prompt() -> dict:
    prompts: list[int] = []

    def prompt(self, s, q, leaving, *, join):
        tokens = leaving.new.shape[2]  # a step comes here too
        prompts[:] = prompts if tokens == 1 else [*prompts, tokens] if int(s.lengths.start.max()) else [tokens]
        return Quest.prompt(self, s, q, leaving, join=join)

    def choose(self, s, q, a):
        return (one_block_less if len(prompts) > 1 else Quest.choose)(self, s, q, a)

    return dict(prompt=prompt, choose=choose)


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        (dict(choose=shifted(1)), "choose selects blocks in the ring"),
        (dict(choose=twice), "choose selects a block twice"),
        (dict(choose=the_sinks), "choose selects blocks in the 4 sinks"),
        (dict(choose=fewer_in_a_batch), "sequence 0 of a ragged batch differs from the sequence alone"),
        (dict(choose=one_block_less), "with a budget for all tokens, outputs differ from dense attention"),
        (one_block_less_after_a_second_prompt(), "a second turn differs from dense attention"),
    ],
    ids=[
        "blocks in the ring", "a block twice", "blocks in the sinks", "fewer blocks in a batch", "a block less",
        "a block less after a turn",
    ],
)  # fmt: skip
def test_a_broken_promise_is_found(hooks, says):
    with pytest.raises(AssertionError, match=says):
        torchsparsekv.check_method(broken(**hooks), **PAGES)


def test_tokens_leave_the_ring_in_the_steps_of_the_check():
    """A method whose index fails only then would pass otherwise."""

    def step(self, s, q, leaving):
        if bool((s.lengths.ring_begin > s.lengths.previous_ring_begin).any()):
            raise AssertionError("tokens left the ring in a decode step")

    with pytest.raises(AssertionError, match="tokens left the ring in a decode step"):
        torchsparsekv.check_method(broken(step=step), sink=16, window=16)


def test_a_choose_that_returns_a_tensor_is_refused():
    tensor = broken(choose=lambda self, s, q, a: Quest.choose(self, s, q, a).ids)
    with pytest.raises(TypeError, match="choose must return a Selection, got Tensor"):
        torchsparsekv.check_method(tensor, **PAGES)


def test_scores_of_another_number_of_blocks_are_refused():
    def choose(self, s, q, a):
        return self.best(s, torch.zeros(*s.hot.slot_of.shape[:2], 3))

    with pytest.raises(ValueError, match=r"one number per block, \(3, 2, \d+\), got \(3, 2, 3\)"):
        torchsparsekv.check_method(broken(choose=choose), **PAGES)


@pytest.mark.parametrize("wrong", [3, int, None])
def test_what_is_no_method_is_refused(wrong):
    with pytest.raises(TypeError, match="check_method takes a subclass of Method"):
        torchsparsekv.check_method(wrong)
