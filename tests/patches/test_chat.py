"""Chat: taking tokens back, editing, answers at the end of the positions, and caches of other kinds."""
import copy
import inspect
import re
import warnings

import pytest
import torch
from cases import METHODS, hyper_of
from models import prompts, tiny
from snapshot import snapshot
from transformers import DynamicCache, GenerationConfig

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.patches._ids import check_continues

SMALL = dict(max_length=128, budget=8, sink=8, window=6, skip_layers=1, block_size=4)
IDS, _ = prompts(2, 60, ragged=False)
PADDED, MASK = prompts(2, 60)
NEXT, _ = prompts(2, 9, seed=6, ragged=False)


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **hyper_of(method, **{**SMALL, **changes}))


def made(method):
    known = {n: x for n, x in hyper_of(method, **SMALL).items() if n not in ("max_length", "skip_layers")}
    return make_method(method, **known)


CAN = [m for m in METHODS if not made(m).traits.cannot_crop]


def prompted(model, handle):
    """A cache that holds IDS."""
    cache = handle.make_cache(2)
    model(IDS, past_key_values=cache)
    return cache


def after(model, cache, keep: int, mask) -> torch.Tensor:
    """Logits of another turn and of five steps, after the first `keep` tokens."""
    turn = torch.cat([mask[:, :keep], torch.ones_like(NEXT)], 1)
    position = turn.cumsum(-1)[:, keep:] - 1
    out = [model(NEXT, attention_mask=turn, position_ids=position, past_key_values=cache).logits]
    for t in range(5):
        out.append(model(NEXT[:, t : t + 1], position_ids=position[:, -1:] + t + 1, past_key_values=cache).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("keep", [2, 13, 43])
@pytest.mark.parametrize("method", CAN)
@torch.no_grad()
def test_cache_cropped_into_its_prompt_equals_a_shorter_prompt(method, keep):
    model = tiny()
    with patch(model, method) as handle:
        fresh, cache = handle.make_cache(2), prompted(model, handle)
        for t in range(8):
            model(NEXT[:, t : t + 1], past_key_values=cache)
        cache.crop(keep)
        assert int(cache.get_seq_length()) == keep
        model(IDS[:, :keep], past_key_values=fresh)
        got, want = (after(model, c, keep, torch.ones_like(IDS)) for c in (cache, fresh))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert [r.steps for r in handle.report().layers] == [8 + 5] * 3, "reports go on"


@pytest.mark.parametrize("method", CAN)
@torch.no_grad()
def test_cache_cropped_into_generated_tokens_continues_as_if_they_had_ended_there(method):
    model = tiny()
    with patch(model, method) as handle:
        cache = prompted(model, handle)
        for t in range(8):
            model(NEXT[:, t : t + 1], past_key_values=cache)
            if t == 2:
                twin = handle.fork(cache)
        cache.crop(-5)
        ones = torch.ones_like(IDS[:, :1]).expand(-1, 63)
        torch.testing.assert_close(after(model, cache, 63, ones), after(model, twin, 63, ones), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", CAN)
@torch.no_grad()
def test_cropped_ragged_batch_equals_shorter_prompts(method):
    model = tiny()
    with patch(model, method) as handle:
        cache, fresh = handle.make_cache(2), handle.make_cache(2)
        position = (MASK.cumsum(-1) - 1).clamp(min=0)
        model(PADDED, attention_mask=MASK, position_ids=position, past_key_values=cache)
        cache.crop(-17)
        given = dict(attention_mask=MASK[:, :43], position_ids=position[:, :43])
        model(PADDED[:, :43], **given, past_key_values=fresh)
        torch.testing.assert_close(after(model, cache, 43, MASK), after(model, fresh, 43, MASK), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in CAN])
@torch.no_grad()
def test_crop_is_refused_with_the_reason_and_the_cache_stays(method):
    model = tiny()
    with patch(model, method) as handle:
        cache = prompted(model, handle)
        twin = handle.fork(cache)
        with pytest.raises(NotImplementedError, match=rf"crop: {method} (stores|selects by).*Handle\.fork"):
            cache.crop(20)
        assert torch.equal(after(model, cache, 60, torch.ones_like(IDS)), after(model, twin, 60, torch.ones_like(IDS)))


@torch.no_grad()
def test_crop_of_a_sliding_window_needs_what_the_window_dropped():
    model = tiny("mistral", sliding_window=16)
    with patch(model) as handle:
        cache = prompted(model, handle)
        with pytest.raises(NotImplementedError, match=r"window of 16 tokens and has dropped the tokens before it"):
            cache.crop(30)
        short, fresh = handle.make_cache(2), handle.make_cache(2)
        model(IDS[:, :16], past_key_values=short)
        short.crop(12)
        model(IDS[:, :12], past_key_values=fresh)
        ones = torch.ones_like(IDS)
        torch.testing.assert_close(after(model, short, 12, ones), after(model, fresh, 12, ones), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_regenerated_answer_is_the_same_answer():
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(2)
        first = model.generate(IDS, past_key_values=cache, max_new_tokens=12, do_sample=False)
        cache.crop(40)
        assert torch.equal(model.generate(IDS, past_key_values=cache, max_new_tokens=12, do_sample=False), first)
        cache.crop(0)
        assert torch.equal(model.generate(IDS, past_key_values=cache, max_new_tokens=12, do_sample=False), first)


# ---------------------------------------------------------------- generate()


@torch.no_grad()
def test_answer_is_capped_at_the_positions_of_the_model():
    model = tiny(max_position_embeddings=64)
    config = GenerationConfig(max_new_tokens=50, do_sample=False)
    with patch(model, max_length=None) as handle:
        for cache in (None, handle.make_cache(2, 64)):
            said = r"max_new_tokens is 5 instead of 50.*max_position_embeddings of the model is 64"
            with pytest.warns(UserWarning, match=said):
                got = model.generate(IDS, generation_config=config, past_key_values=cache)
            assert got.shape[1] == 65, "the last token needs no place in a cache"
        assert config.max_new_tokens == 50
        assert torch.equal(got, model.generate(IDS, max_new_tokens=5, do_sample=False))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.generate(IDS, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("given", [dict(max_length=100), dict(max_length=100, attention_mask=torch.ones_like(IDS))])
@torch.no_grad()
def test_max_length_beyond_the_positions_is_capped_too(given):
    model = tiny(max_position_embeddings=64)
    with patch(model, max_length=None):
        want = model.generate(IDS, max_new_tokens=5, do_sample=False)
        said = r"max_length is 65 instead of 100, because max_position_embeddings of the model is 64"
        with pytest.warns(UserWarning, match=said):
            assert torch.equal(model.generate(IDS, do_sample=False, **given), want)


@torch.no_grad()
def test_prompt_of_embeddings_is_counted():
    """They come without token ids, and transformers counts them apart."""
    model = tiny(max_position_embeddings=64)
    embed = model.get_input_embeddings()
    with patch(model, max_length=None) as handle:
        want = model.generate(IDS, max_new_tokens=5, do_sample=False)
        with pytest.warns(UserWarning, match="max_new_tokens is 5 instead of 50, because the prompt has 60 tokens"):
            got = model.generate(inputs_embeds=embed(IDS), max_new_tokens=50, do_sample=False)
        assert torch.equal(got, want[:, 60:])
        cache = handle.make_cache(2, 64)
        model.generate(inputs_embeds=embed(IDS[:, :40]), past_key_values=cache, max_new_tokens=4, do_sample=False)
        cache.crop(40)
        with pytest.raises(ValueError, match="this call has 30 tokens and the SparseCache holds 40"):
            model.generate(inputs_embeds=embed(IDS[:, :30]), past_key_values=cache, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("chunk", [59, 1, 2, 3, 60, 200])
@torch.no_grad()
def test_chunks_of_a_prompt_are_balanced(chunk):
    """61 tokens in chunks of 59 would leave two, 60 in chunks of 59 one."""
    model, seen = tiny(), []
    config = GenerationConfig(prefill_chunk_size=chunk, max_new_tokens=4, do_sample=False)
    with patch(model, budget=64, sink=8) as handle:
        want = model.generate(IDS, max_new_tokens=4, do_sample=False)
        hook = model.model.layers[0].register_forward_pre_hook(lambda m, a: seen.append(a[0].shape[1]))
        for ids in (IDS, torch.cat([IDS, NEXT[:, :1]], 1)):
            seen.clear()
            got = model.generate(ids, generation_config=config)
            prompt = seen[: len(seen) - 3]
            assert sum(prompt) == ids.shape[1]
            assert min(prompt) > 1
            assert ids.shape[1] > 60 or torch.equal(got, want)
        hook.remove()
        assert config.prefill_chunk_size == chunk
        assert handle.active


@torch.no_grad()
def test_dynamic_cache_by_either_way_is_dense_and_warns():
    model = tiny()
    want = model.generate(IDS, max_new_tokens=4, do_sample=False)
    with patch(model, budget=4) as handle:
        for options in (dict(cache_implementation="dynamic"), dict(past_key_values=DynamicCache())):
            with pytest.warns(UserWarning, match="this decode step is dense"):
                got = model.generate(IDS, max_new_tokens=4, do_sample=False, **options)
            assert torch.equal(got, want)
        assert handle._latest is None


# ---------------------------------------------------------------- patch()


def test_config_of_two_models_shows_nothing_of_a_patch():
    model = tiny()
    other, before = type(model)(model.config).eval(), snapshot(model)
    config = model.config
    with patch(model) as first:
        assert config._attn_implementation == other.config._attn_implementation == "sdpa"
        with patch(other):
            assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False)[:, :60], IDS)
            first.unpatch()
            with torch.no_grad():
                other.generate(IDS, max_new_tokens=4, do_sample=False)
        assert model.config is other.config is config
    assert snapshot(model) == before


def test_config_that_the_user_changed_while_patched_stays_changed():
    model = tiny()
    handle = patch(model)
    model.config.bos_token_id, model.config.mine = 7, "mine"
    twin = copy.deepcopy(model)
    handle.unpatch()
    assert (model.config.bos_token_id, model.config.mine) == (7, "mine")
    assert model.config._attn_implementation == "sdpa"
    twin._torchsparsekv.unpatch()
    assert (twin.config.bos_token_id, twin.config._attn_implementation) == (7, "sdpa")
    assert twin.model.config is twin.config is not model.config


def test_short_cache_says_that_nothing_will_be_saved():
    said = "nothing will be saved: quest attends to every token of a sequence of up to 78 tokens .*and max_length is 64"
    with pytest.warns(UserWarning, match=said), patch(tiny(), budget=64, max_length=64) as handle:
        assert any(re.search(said, note) for note in handle.report().notes)
    with pytest.warns(UserWarning, match="nothing will be saved"), patch(tiny(), budget=64, max_length=78):
        pass
    for hyper in ({}, dict(budget=64, max_length=79)):
        with warnings.catch_warnings(), patch(tiny(), **hyper) as handle:
            warnings.simplefilter("error")
            assert not handle.report().notes


# ---------------------------------------------------------------- SparseCache(model)


@torch.no_grad()
def test_cache_that_is_constructed_patches_its_model():
    model = tiny()
    with patch(model):
        want = model.generate(IDS, max_new_tokens=8, do_sample=False)
    before = snapshot(model)
    options = {n: x for n, x in SMALL.items() if n != "max_length"}
    cache = torchsparsekv.SparseCache(model, "quest", batch_size=2, max_length=128, **options)
    assert torch.equal(model.generate(IDS, past_key_values=cache, max_new_tokens=8, do_sample=False), want)
    assert int(cache.get_seq_length()) == 67
    second = torchsparsekv.SparseCache(model, "quest", batch_size=2)
    assert second.handle is cache.handle
    assert torch.equal(model.generate(IDS, past_key_values=second, max_new_tokens=8, do_sample=False), want)
    cache.handle.unpatch()
    assert snapshot(model) == before


def test_constructed_cache_takes_every_keyword_of_patch():
    """With one exception: `max_length` and `method` are arguments of their own."""
    keywords = set(inspect.signature(torchsparsekv.patch).parameters) - {"model", "method", "max_length", "hyper"}
    given = dict(
        budget=8, sink=8, window=None, offload="host", pool_dtype="int8", hot_gib=0.001, skip_layers=1,
        layers={2: "full"}, step="compiled",
    )  # fmt: skip
    assert set(given) == keywords
    cache = torchsparsekv.SparseCache(tiny(), "quest", max_length=512, block_size=4, **given)
    with torchsparsekv.patch(tiny(), "quest", max_length=512, block_size=4, **given) as handle:
        assert repr(cache.handle) == repr(handle)
    cache.handle.unpatch()


def test_constructed_cache_that_is_refused_leaves_the_model_unpatched():
    model = tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        torchsparsekv.SparseCache(model, "quest", batch_size=0, **SMALL)
    assert snapshot(model) == before
    first = torchsparsekv.SparseCache(model, "quest", **SMALL)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        torchsparsekv.SparseCache(model, "quest", batch_size=0)
    assert first.handle.active, "the first cache is in use"
    first.handle.unpatch()


@torch.no_grad()
def test_warnings_name_the_line_of_the_user():
    model = tiny(max_position_embeddings=128)
    saving = {n: x for n, x in SMALL.items() if n != "max_length"}
    where = dict(max_new_tokens=100, do_sample=False)
    acts = {
        "has room for 128 tokens": lambda: torchsparsekv.SparseCache(model, "quest", **saving),
        "max_new_tokens is 69 instead of 100": lambda: model.generate(IDS, **where),
        "this decode step is dense": lambda: model.generate(IDS[:, :20], cache=DynamicCache(), **where),
    }
    for says, act in acts.items():
        with pytest.warns(UserWarning, match=f"torchsparsekv: .*{says}") as told:
            act()
        assert {w.filename for w in told if str(w.message).startswith("torchsparsekv: ")} == {__file__}
    model._torchsparsekv.unpatch()
    with pytest.warns(UserWarning, match="nothing will be saved") as told:
        torchsparsekv.SparseCache(model, "quest", max_length=16, **{**saving, "budget": 8})
    assert told[0].filename == __file__


def changed(ids, row, at):
    """The same ids, but for one token, which does not become the padding, 0."""
    return ids.index_put((torch.tensor(row), torch.tensor(at)), ids[row, at] % 49 + 1)


@torch.no_grad()
def test_prompt_that_does_not_continue_the_cache_is_refused():
    model, turn = tiny(), dict(max_new_tokens=6, do_sample=False)
    with patch(model) as handle:
        cache = handle.make_cache(2)
        answer = model.generate(IDS, cache=cache, **turn)
        held = int(cache.get_seq_length())
        ids = torch.cat([answer, NEXT], 1)
        for at in (0, 17, held - 1):  # in the prompt, and in the answer
            with pytest.raises(ValueError, match=rf"does not continue .*: token {at} of row 1 has id .*crop\({at}\)"):
                model.generate(changed(ids, 1, at), cache=cache, **turn)
        with pytest.raises(ValueError, match="token 3 of row 1"):  # the earliest, of whatever row
            model.generate(changed(changed(ids, 0, 5), 1, 3), cache=cache, **turn)
        second = model.generate(changed(ids, 1, held), cache=cache, **turn)  # the cache has not read this token
        with pytest.raises(ValueError, match=rf"token {held} of row 1"):
            model.generate(torch.cat([ids, second[:, ids.shape[1] :], NEXT], 1), cache=cache, **turn)
        check_continues(cache, ids[:0])  # no rows: generate() refuses them by their number
        model.generate(torch.cat([second, NEXT], 1), cache=cache, **turn)


@torch.no_grad()
def test_ids_of_a_cache_follow_crop_reset_and_fork():
    model, turn = tiny(), dict(max_new_tokens=6, do_sample=False)
    with patch(model) as handle:
        cache = handle.make_cache(1)
        ids = torch.cat([model.generate(IDS[:1], cache=cache, **turn), NEXT[:1]], 1)
        forks = [handle.fork(cache), handle.fork(cache, batch_size=2)]
        cache.crop(20)
        model.generate(changed(ids, 0, 20), cache=cache, **turn)
        cache.crop(20)
        with pytest.raises(ValueError, match="token 19 of row 0"):
            model.generate(changed(ids, 0, 19), cache=cache, **turn)
        cache.reset()
        model.generate(changed(ids, 0, 19), cache=cache, **turn)
        for fork in forks:
            rows = ids.expand(fork.batch, -1)
            with pytest.raises(ValueError, match=f"token 19 of row {fork.batch - 1}"):
                model.generate(changed(rows, fork.batch - 1, 19), cache=fork, **turn)
            model.generate(rows, cache=fork, **turn)


class Interrupt:
    """A streamer that interrupts generate() at token number `at` of the answer, or at 0 before anything is stored."""

    def __init__(self, at: int):
        self.left = at

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self): ...


@pytest.mark.parametrize("method", ["quest", "full"])
@pytest.mark.parametrize("turns", [0, 1])
@torch.no_grad()
def test_answer_that_was_cut_off_is_not_taken_for_another_text(turns, method):
    """generate() did not return the tokens of the answer, so no later call can compare them."""
    model, turn = tiny(), dict(max_new_tokens=8, do_sample=False)
    with patch(model, method) as handle:
        cache, ids = handle.make_cache(1), IDS[:1]
        if turns:
            ids = torch.cat([model.generate(ids, cache=cache, **turn), NEXT[:1]], 1)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, cache=cache, streamer=Interrupt(4), **turn)
        known, held = ids.shape[1], int(cache.get_seq_length())
        assert held == known + 3
        other = torch.cat([changed(ids, 0, known - 1), NEXT[:1]], 1)
        for one in (cache, handle.fork(cache)):
            with pytest.raises(ValueError, match=rf"holds {held} tokens.* the last 3, .*crop\({known}\)"):
                model.generate(other, cache=one, **turn)
        cache.crop(known + 1)  # one of them stays
        with pytest.raises(ValueError, match="the last 1, "):
            model.generate(other, cache=cache, **turn)
        cache.crop(known)
        with pytest.raises(ValueError, match=rf"token {known - 1} of row 0"):
            model.generate(other, cache=cache, **turn)
        cache.crop(known - 1)
        want = model.generate(other, **turn)
        assert torch.equal(model.generate(other, cache=cache, **turn), want)
        with pytest.raises(KeyboardInterrupt):
            model.generate(torch.cat([want, NEXT[:1]], 1), cache=cache, streamer=Interrupt(4), **turn)
        cache.reset()
        assert torch.equal(model.generate(other, cache=cache, **turn), want)
        model.generate(torch.cat([want, NEXT[:1]], 1), cache=cache, **turn)


@torch.no_grad()
def test_call_that_is_refused_or_interrupted_before_it_stores_leaves_the_ids():
    model, turn = tiny(), dict(max_new_tokens=6, do_sample=False)
    with patch(model) as handle:
        cache = handle.make_cache(1)
        ids = torch.cat([model.generate(IDS[:1], cache=cache, **turn), NEXT[:1]], 1)
        for error, given, how in (
            (ValueError, ids.expand(3, -1), {}), (KeyboardInterrupt, ids, dict(streamer=Interrupt(0))),
        ):  # fmt: skip
            before = cache.ids
            with pytest.raises(error):
                model.generate(given, cache=cache, **how, **turn)
            assert torch.equal(cache.ids, before)
            assert not cache.cut_off
        model.generate(ids, cache=cache, **turn)


@torch.no_grad()
def test_prompt_of_several_sequences_is_known_after_an_error():
    """The error comes before a forward reads a token of the answer."""

    def interrupt(ids, scores):
        raise KeyboardInterrupt

    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(2)
        with pytest.raises(KeyboardInterrupt):
            model.generate(
                IDS[:1], cache=cache, num_return_sequences=2, do_sample=True, max_new_tokens=6,
                logits_processor=[interrupt],
            )  # fmt: skip
        assert torch.equal(cache.ids, IDS[:1].expand(2, -1))
        assert not cache.cut_off


@torch.no_grad()
def test_ids_that_nobody_sees_are_not_compared():
    """Padding, tokens of loops of one's own, and embeddings."""
    model, turn = tiny(), dict(max_new_tokens=6, do_sample=False)
    with patch(model) as handle:
        cache = handle.make_cache(2)
        answer = model.generate(PADDED, attention_mask=MASK, cache=cache, **turn)
        pad = int((MASK[:, 0] == 0).nonzero()[0])
        ids = torch.cat([changed(answer, pad, 0), NEXT], 1)
        mask = torch.cat([MASK, torch.ones_like(ids[:, MASK.shape[1] :])], 1)
        model.generate(ids, attention_mask=mask, cache=cache, **turn)
        looped = prompted(model, handle)
        model.generate(changed(torch.cat([IDS, NEXT], 1), 0, 5), cache=looped, **turn)
        own = handle.make_cache(2)
        said = model.generate(IDS, cache=own, custom_generate=lambda model, input_ids, **how: "said", **turn)
        assert said == "said"
        assert own.ids is None
        embedded = handle.make_cache(2)
        model.generate(inputs_embeds=model.get_input_embeddings()(IDS), cache=embedded, **turn)
        assert embedded.ids is None


@torch.no_grad()
def test_sampled_sequences_of_one_prompt_are_compared_row_by_row():
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(4)
        torch.manual_seed(0)
        turn = dict(max_new_tokens=6, do_sample=True, return_dict_in_generate=True)
        answers = model.generate(IDS, cache=cache, num_return_sequences=2, **turn).sequences
        ids = torch.cat([answers, NEXT[:1].expand(4, -1)], 1)
        with pytest.raises(ValueError, match="token 62 of row 3"):
            model.generate(changed(ids, 3, 62), cache=cache, **turn)
        model.generate(ids, cache=cache, **turn)
        cache.crop(50)
        model.generate(IDS, cache=cache, num_return_sequences=2, **turn)  # two rows for each prompt again
        cache.crop(50)
        with pytest.raises(ValueError, match="token 7 of row 2"):
            model.generate(changed(IDS, 1, 7), cache=cache, num_return_sequences=2, **turn)
