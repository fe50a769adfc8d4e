"""Overlapping calls, interrupted forwards and contradictory masks give right answers or errors."""
import copy
import gc
import threading
import weakref

import pytest
import torch
from caches_in_use import IDS, MASK, OTHER, SMALL, at_each, generate, patch
from cases import METHODS, hyper_of
from generating import GREEDY, auto_compiled
from models import greedy_logits, tiny
from snapshot import snapshot
from transformers import TextIteratorStreamer
from world import DEVICE

import torchsparsekv

# ---------------------------------------------------------------- calls that overlap


def in_step(model, prompts_of):
    """generate() in as many threads, which go token by token in turn; what each answered, or raised."""
    turn = threading.Barrier(len(prompts_of), timeout=60)
    found = [None] * len(prompts_of)

    def run(i):
        try:
            # CUDA graphs have limits of their own in threads (docs/guide/own-loop.md)
            found[i] = generate(model, prompts_of[i], disable_compile=True, **at_each(turn.wait))
        except Exception as e:
            found[i] = e
            turn.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts_of))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return found


def test_calls_in_two_threads_answer_as_one_after_the_other():
    model = tiny()
    with patch(model) as handle:
        want = [generate(model, ids) for ids in (IDS, OTHER)]
        assert not torch.equal(want[0][:, 40:], want[1][:, 33:]), "two prompts with one answer prove nothing"
        kept = handle._recycled
        for _ in range(2):
            got = in_step(model, [IDS, OTHER])
            assert all(torch.equal(g, w) for g, w in zip(got, want)), got
        assert handle._recycled is kept, "the cache that was there is used again as soon as it is free"
        assert not kept.use.generating


def test_generate_inside_a_generate():
    model = tiny()
    with patch(model) as handle:
        want, inner = generate(model), []
        got = generate(model, **at_each(lambda: inner.append(generate(model, OTHER)) if len(inner) < 2 else None))
        assert torch.equal(got, want)
        assert all(torch.equal(x, generate(model, OTHER)) for x in inner)
        assert handle._recycled is not None


def test_new_chat_while_an_old_streamer_runs():
    """A chat that is left and begun anew while the thread of the first answer goes on."""
    from generating import tokenizer

    model, words = tiny(), tokenizer()
    with patch(model):
        first, second = generate(model, IDS[:1]), generate(model, OTHER[:1])
        streamer, middle, go = TextIteratorStreamer(words), threading.Event(), threading.Event()
        act = lambda: (middle.set(), go.wait(60))  # noqa: E731
        options = dict(streamer=streamer, **at_each(act))
        thread = threading.Thread(target=generate, args=(model, IDS[:1]), kwargs=options)
        thread.start()
        assert middle.wait(60)
        assert torch.equal(generate(model, OTHER[:1]), second)
        go.set()
        thread.join(60)
        assert "".join(streamer) == words.decode(first[0])


def test_given_cache_is_used_by_one_call_at_a_time():
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(2)

        def again():
            with pytest.raises(RuntimeError, match="another generate\\(\\) is running on this SparseCache"):
                generate(model, OTHER, past_key_values=cache)

        want = generate(model)
        assert torch.equal(generate(model, past_key_values=cache, **at_each(again)), want)
        cache.reset()
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: again())  # in the middle of a forward too
        assert torch.equal(generate(model, past_key_values=cache), want)
        hook.remove()
        cache.reset()
        assert torch.equal(generate(model, past_key_values=cache), want), "it is free again"


def test_generate_of_the_class_gets_its_own_cache():
    model = tiny()
    with patch(model) as handle:
        want = generate(model)
        kept = handle._recycled
        got = type(model).generate(model, input_ids=IDS, attention_mask=torch.ones_like(IDS), **GREEDY)
        assert torch.equal(got, want)
        assert handle._recycled is None or handle._recycled is kept
        assert torch.equal(generate(model), want)


def test_generate_of_the_user_is_kept():
    model = tiny()
    plain = model.generate
    model.generate = lambda *args, **kwargs: plain(*args, **kwargs)
    mine = model.generate
    with patch(model):
        assert model.generate is mine
        generate(model)
    assert vars(model)["generate"] is mine


# ---------------------------------------------------------------- forwards that break off


class Break(Exception):
    pass


def breaking(model, where, error):
    """The model, with one module that raises when it is called."""
    return model.get_submodule(where).register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(error))


PLACES = ("model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "model.layers.2.mlp", "lm_head")
ERRORS = {"exception": Break(), "interrupt": KeyboardInterrupt(), "memory": torch.OutOfMemoryError("no more")}


@pytest.mark.parametrize(("where", "error"), [*zip(PLACES, (*ERRORS, *ERRORS)), *zip(PLACES[::-1], ERRORS)])
def test_interrupted_prompt_cannot_be_continued(where, error):
    model = tiny()
    ids = IDS[1:]
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(1)
        want = greedy_logits(model, ids, torch.ones_like(ids), 4, cache)
        cache.reset()
        hook = breaking(model, where, ERRORS[error])
        with pytest.raises(type(ERRORS[error])):
            model(ids, past_key_values=cache)
        hook.remove()
        ways = (
            lambda: model(ids, past_key_values=cache), lambda: model(ids[:, :1], past_key_values=cache),
            lambda: model.model(ids, past_key_values=cache), lambda: generate(model, ids, past_key_values=cache),
            lambda: torch.compile(model.forward, backend="eager")(ids[:, :1], past_key_values=cache),
        )  # fmt: skip
        for way in ways if where == PLACES[0] else ways[:-1]:  # tracing takes long
            with pytest.raises(Exception, match=r"did not finish.*call cache.reset\(\)") as seen:
                way()
            assert seen.type is not AssertionError
        cache.reset()
        assert torch.equal(greedy_logits(model, ids, torch.ones_like(ids), 4, cache), want)


def test_interrupted_decode_step_cannot_be_continued():
    model = tiny()
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        hook = breaking(model, "model.layers.1.mlp", Break())
        with pytest.raises(Break):
            model(IDS[:, :1], past_key_values=cache)
        hook.remove()
        with pytest.raises(RuntimeError, match="did not finish"):
            model(IDS[:, :1], past_key_values=cache)


def test_refused_forward_leaves_the_cache_unchanged():
    """What is refused before anything is stored can be put right and tried again."""
    model = tiny()
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(2, 64)
        want = greedy_logits(model, IDS, MASK, 3, cache)
        cache.reset()
        for mask in (MASK.flip(1), MASK[:, 1:]):
            with pytest.raises(ValueError):
                model(IDS, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ValueError, match="overrun"):
            model(torch.cat([IDS, IDS], 1), past_key_values=cache)
        assert torch.equal(greedy_logits(model, IDS, MASK, 3, cache), want)


def test_forward_of_the_inner_model_counts_as_complete():
    """Without its head, by position, or with layers compiled one by one: none of it is taken for broken off."""
    model = tiny()
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(2)
        with pytest.raises(ValueError, match="overrun"):  # said it was of the whole model, and never began
            model(IDS.repeat(1, 99), past_key_values=cache)
        for _ in range(2):
            model.model(IDS[:, :5], past_key_values=cache)
        model(IDS[:, :5], None, None, cache)
        model.model(IDS[:, :5], past_key_values=cache)
        for i in (0, 2):
            model.model.layers[i].compile(backend="eager")
        for _ in range(3):
            assert model(IDS[:, :1], past_key_values=cache).logits.isfinite().all()


def test_prompt_with_one_compiled_layer_counts_as_complete():
    """The first layer, compiled alone, moves the lengths; the others must not take those of the prompt before."""
    model = tiny()
    with patch(model, skip_layers=0) as handle, torch.no_grad():
        cache = handle.make_cache(2)
        lengths = cache.layers[0].state.row_lengths
        model(IDS[:, :9], past_key_values=cache)
        assert lengths.spans(9) == [0, 0, 9, 9]
        model.model.layers[0].compile(backend="eager")
        model(IDS[:, 9:18], past_key_values=cache)
        assert lengths.view.length.tolist() == [18, 18]
        assert lengths.spans(9) in (None, [9, 9, 18, 18])


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("compiled", [False, True])
def test_generate_after_an_interrupted_generate(error, compiled):
    model = tiny(num_hidden_layers=2)
    options = auto_compiled() if compiled else {}
    with patch(model) as handle:
        want = generate(model, **options)
        kept, steps = handle._recycled, []

        def act():
            steps.append(0)
            if len(steps) == 5:
                raise ERRORS[error]

        for where in (None, "model.layers.1.mlp"):
            hook = breaking(model, where, ERRORS[error]) if where else None
            with pytest.raises(type(ERRORS[error])):
                generate(model, **options, **at_each(act))
            if hook:
                hook.remove()
            assert torch.equal(generate(model, **options), want)
            assert handle._recycled is kept


def test_patched_and_unpatched_a_hundred_times():
    model = tiny(num_hidden_layers=2)
    before, words, gone = snapshot(model), generate(model), []
    for i in range(100):
        with patch(model, ("quest", "streaming")[i % 2]) as handle:
            gone.append(weakref.ref(handle.make_cache(2)))
            if i % 20 == 0:
                generate(model)
                gone.append(weakref.ref(handle._recycled))
        gone.append(weakref.ref(handle))
    del handle
    gc.collect()
    assert snapshot(model) == before
    assert torch.equal(generate(model), words)
    assert not [r for r in gone if r() is not None], "something of a patch is still held"


# ---------------------------------------------------------------- masks


def ones(rows, width):
    return torch.ones(rows, width, dtype=torch.long, device=DEVICE)


def hiding(mask, column):
    return mask.index_fill(1, torch.tensor([column], device=DEVICE), 0)


FULL = torch.cat([MASK, ones(2, 3)], 1)
CONTRARY = {
    "too narrow": (FULL[:, :-1], "of 42 columns does not fit: the cache holds 40 tokens and 3 are new, so it needs 43"),
    "too wide": (torch.cat([FULL, ones(2, 1)], 1), "of 44 columns does not fit"),
    "hides a stored token": (hiding(FULL, 20), "contradicts the cache"),
    "hides the first tokens": (torch.cat([hiding(MASK, 0), ones(2, 3)], 1), "contradicts the cache"),
    "shows padding": (ones(2, 43), "contradicts the cache"),
    "hides a new token": (hiding(FULL, 42), "contradicts the cache"),
    "hides a new token, alone": (hiding(ones(2, 3), 0), "contradicts the cache"),
    "of fewer rows": (FULL[:1], "made for batch size 2, the attention mask has 1 rows"),
}


@pytest.mark.parametrize("mask", CONTRARY)
@pytest.mark.parametrize("tokens", [1, 3])
def test_masks_that_contradict_the_cache_are_refused(mask, tokens):
    if tokens == 1 and DEVICE.type == "cuda":
        pytest.skip("seeing it would wait for the device at every step")
    model = tiny()
    given, says = CONTRARY[mask]
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(2)
        first = IDS if tokens == 3 else torch.cat([IDS, IDS[:, :2]], 1)
        shown = MASK if tokens == 3 else FULL[:, :42]
        if tokens == 1:
            given = given[:, -1:] if "alone" in mask else given
            given = hiding(ones(2, 1), 0) if "alone" in mask else given
            says = says.replace("40 tokens and 3", "42 tokens and 1")
        model(first, attention_mask=shown, past_key_values=cache)
        with pytest.raises(ValueError, match=says):
            model(IDS[:, :tokens], attention_mask=given, past_key_values=cache)
        for right in (FULL, ones(2, tokens), None):  # and it goes on
            cache.reset()
            model(first, attention_mask=shown, past_key_values=cache)
            logits = model(IDS[:, :tokens], attention_mask=right, past_key_values=cache).logits
            assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("method", "compiled"), [*((m, False) for m in METHODS), ("quest", True), ("icecache", True)]
)
def test_ragged_prompt_in_chunks_equals_one_prompt(method, compiled):
    """Rows that begin with whole chunks of padding; as the unpatched model answers it."""
    model = tiny(num_hidden_layers=2)
    ids, mask = IDS.clone(), ones(2, 40)
    mask[0, :21], ids[0, :21] = 0, 0
    ask = dict(input_ids=ids, attention_mask=mask, **GREEDY, **(auto_compiled() if compiled else {}))
    want = model.generate(**ask)
    window = {"window": 128} if method == "streaming" else {}
    with torchsparsekv.patch(model, method, **{**hyper_of(method, **{**SMALL, "budget": 128, "sink": 8}), **window}):
        assert torch.equal(model.generate(**ask, prefill_chunk_size=8), want)
        with pytest.raises(ValueError, match="a row of the batch is nothing but padding"):
            model.generate(**{**ask, "attention_mask": mask * 0}, prefill_chunk_size=8)


# ---------------------------------------------------------------- what else a user may do


def test_output_attentions_is_refused():
    model = tiny()
    says = "a sparse step has no attention weights to return"
    with patch(model) as handle, torch.no_grad():
        cache = handle.make_cache(2)
        with pytest.raises(ValueError, match=says):
            model(IDS, past_key_values=cache, output_attentions=True)
        with pytest.raises(ValueError, match=says):
            generate(model, output_attentions=True, return_dict_in_generate=True)
        assert model(IDS, past_key_values=cache).logits.isfinite().all()


def test_report_is_readable_after_unpatch():
    model = tiny()
    with patch(model) as handle:
        generate(model)
        said = str(handle.report())
    assert str(handle.report()) == said
    assert "quest" in said
    assert "!!" not in said
    gone = weakref.ref(handle.model)
    handle.model = None
    del model
    gc.collect()
    assert gone() is None


def test_deepcopy_generates_while_the_original_generates():
    model = tiny()
    with patch(model):
        want, seen = generate(model), []
        generate(model, **at_each(lambda: seen or seen.append(generate(copy.deepcopy(model)))))
        assert torch.equal(seen[0], want)
