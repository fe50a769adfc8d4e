"""MagicPIG equals the definition of its paper, written a second time as plainly as possible, from raw keys."""
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import SINK, WINDOW, Layer, frontier, small
from past import Past, pasts
from planted import LENGTH, PLANTED, finds
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.ops.magicpig._planes import hashes, planes
from torchsparsekv.ops.magicpig.find_collisions import second_collisions
from torchsparsekv.ops.magicpig.sample_bias import FLOOR, chance
from torchsparsekv.state import Geometry

HYPER = dict(bits=3, tables=12)

# ---------------------------------------------------------------- the hash


def finalised(x: int) -> int:
    """MurmurHash3's finaliser, on 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ x >> shift) * factor % (1 << 32)
    return x


@pytest.mark.parametrize("seed", [0, 7, 65535])
def test_entry_of_a_plane_is_a_sum_of_hexadecimal_digits(seed):
    got = planes(5, 3, 4, seed)
    want = [
        [sum(int(digit, 16) for digit in f"{finalised((c * 512 + d + seed * 0x9E3779B1) % (1 << 32)):x}") - 60
         for c in range(12)]
        for d in range(5)
    ]  # fmt: skip
    assert got.tolist() == want


@pytest.mark.parametrize("angle", [0.2, 0.6, 1.2, math.pi / 2, 2.5])
@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_a_bit_collides_with_the_chance_of_its_angle(outlier, angle):
    """p = 1 - angle / pi, also where one channel stands far out."""
    g = torch.Generator().manual_seed(int(10 * angle))
    x, other = torch.randn(2, 64, generator=g, dtype=torch.float64)
    x[3] *= outlier
    x /= x.norm()
    other -= (other @ x) * x
    y = math.cos(angle) * x + math.sin(angle) * other / other.norm()
    hits = [hashes(torch.stack([x, y]).float(), None, 1000, 1, seed) for seed in range(20)]
    share = float(torch.stack([h[0] == h[1] for h in hits]).double().mean())
    assert abs(share - (1 - angle / math.pi)) < 0.02


def test_sample_divided_by_its_chance_estimates_every_token_without_bias():
    g = torch.Generator().manual_seed(0)
    keys, q = torch.randn(200, 64, generator=g), torch.randn(1, 64, generator=g)
    cosine = torch.nn.functional.cosine_similarity(keys, q)
    w = chance(cosine, 4, torch.tensor(20.0))
    found = torch.zeros(200)
    for seed in range(400):
        codes, asked = (hashes(x, None, 20, 4, seed) for x in (keys, q))
        found += second_collisions(codes.T, asked)[0] <= 20
    ratio = found / 400 / w
    assert abs(float(ratio.mean()) - 1) < 0.02
    assert float(ratio.std()) < 1.5 * float(((1 - w) / w / 400).mean().sqrt())


def test_chance_is_that_of_two_hits_or_more():
    for p, bits, tables in ((0.9, 2, 5), (0.6, 3, 40), (0.55, 10, 150)):
        one, rest = p**bits, 1 - p**bits
        want = sum(math.comb(tables, j) * one**j * rest ** (tables - j) for j in range(2, tables + 1))
        got = chance(torch.tensor(math.cos(math.pi * (1 - p))).double(), bits, torch.tensor(float(tables)).double())
        assert math.isclose(float(got), want, rel_tol=1e-5)


# ---------------------------------------------------------------- the choice and its weights


def codes(x: torch.Tensor, method) -> torch.Tensor:
    """Bits [.., tables, bits] of vectors. Products of whole numbers less a mean are 0 or at least 1/100."""
    plane = planes(x.shape[-1], method.tables, method.bits, method.seed).double()
    return (x @ plane > 4e-3).unflatten(-1, (method.tables, method.bits))


def centre_of(keys: torch.Tensor, past: Past, b: int) -> torch.Tensor:
    """The mean of what had left the ring at the last prompt, or of all if nothing had; 0 without a prompt."""
    pad, at, centre = (past.pad, 0)[b], 0, torch.zeros(keys.shape[1]).double()
    for size in past.sizes:
        at += size
        n = at - pad
        if size > 1 and n > 0:
            end = frontier(n, block=1)
            centre = (keys[SINK:end] if end > SINK else keys[:n]).mean(0)
    return centre


def sampled(keys, queries, past: Past, b: int, method) -> tuple[int, list[list[int]]]:
    """The tables that a step uses, and the positions that each query head samples by them."""
    end = frontier(len(keys), block=1)
    if end - SINK <= method.budget:
        return 0, [list(range(SINK, end))] * len(queries)
    mine, theirs = codes(queries, method), codes(keys[SINK:end] - centre_of(keys, past, b), method)
    hit = (mine[:, None] == theirs[None]).all(-1).int().cumsum(-1)  # [queries, tokens, tables]
    for used in range(method.tables, 0, -1):
        found = hit[..., used - 1] >= 2
        if int(found.any(0).sum()) <= method.budget:
            return used, [(one.nonzero()[:, 0] + SINK).tolist() for one in found]
    return 0, [[]] * len(queries)


@given(past=pasts(whole=True), budget=st.integers(1, 30), bits=st.sampled_from([1, 2, 4]))
def test_choice_equals_the_definition_of_the_paper(past, budget, bits):
    method = small("magicpig", budget=budget, bits=bits, tables=9)
    layer = past.fill(method)
    chosen = layer.choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        used, found = sampled(keys, queries, past, b, method)
        ids = chosen[b, h][chosen[b, h] >= 0].tolist()
        assert ids == sorted(set().union(*map(set, found)))
        assert int(layer.state.sample.used[b, h]) == used


@pytest.mark.parametrize("kind", ["reference", "triton"])
@given(past=pasts(whole=True, most=60), budget=st.integers(1, 30), bits=st.sampled_from([1, 2]))
def test_output_equals_the_weighed_softmax_of_the_sample(kind, past, budget, bits):
    """Sinks, ring, and for each query head its own sample, whose logits have minus the logarithm of the chance."""
    method = small("magicpig", budget=budget, bits=bits, tables=5)
    g = torch.Generator().manual_seed(past.seed)
    k, v = (torch.randn(2, past.heads, 1, past.dim, generator=g).round() for _ in range(2))
    layer = past.fill(method)
    with use_kernels(kind):
        out = layer.feed(past.query, k, v).cpu().double()
    past.k, past.v, past.length = torch.cat([past.k, k], 2), torch.cat([past.v, v], 2), past.length + 1
    past.sizes = [*past.sizes, 1]
    for b, h, keys, queries in past.heads_of_rows():
        used, found = sampled(keys, queries, past, b, method)
        values, centre = past.v[b, h, (past.pad, 0)[b] :].double(), centre_of(keys, past, b)
        end = frontier(len(keys), block=1)
        for head, (x, mine) in enumerate(zip(queries, found)):
            near = [*range(min(SINK, len(keys))), *range(end, len(keys))]
            cosine = torch.nn.functional.cosine_similarity(keys[mine] - centre, x[None], dim=1, eps=1e-30)
            p = (1 - cosine.clamp(-1, 1).acos() / math.pi) ** bits
            w = 1 - (1 - p) ** used - used * p * (1 - p) ** (used - 1) if used else torch.ones(len(mine)) - FLOOR
            z = torch.cat([keys[near] @ x, keys[mine] @ x]) * past.dim**-0.5
            z[len(near) :] -= (w + FLOOR).log()
            want = z.softmax(0) @ values[[*near, *mine]]
            torch.testing.assert_close(out[b, h * past.group + head, 0], want, rtol=2e-3, atol=2e-3)


def test_smaller_budgets_use_fewer_tables():
    past, used = Past(90, 0, 2, [90], 3, False), []
    for budget in (2, 8, 20, 60, 90):
        layer = past.fill(small("magicpig", budget=budget, **HYPER))
        assert int((layer.choose(past.query) >= 0).sum(-1).max()) <= budget
        used.append(layer.state.sample.used[1, 0].item())
    assert used[:4] == sorted(used[:4])
    assert 1 <= used[0] < used[3]
    assert used[4] == 0, "everything fits"


def test_where_values_follow_weights_a_sample_is_closer_to_dense_than_the_exact_best():
    """The paper's argument: the best tokens leave out the many others, and what these have in common."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 2001, 32, generator=g) for _ in range(2))
    z = q[:, :, -1:] @ k.transpose(-1, -2) * 32**-0.5
    v = z.transpose(-1, -2).tanh() + 0.1 * torch.randn(1, 1, 2001, 32, generator=g)
    want = z.softmax(-1) @ v

    def error(name: str, **hyper) -> float:
        layer = Layer(small(name, budget=600, **hyper), heads=1, dim=32, rows=2048, device=torch.device("cpu"))
        return float((layer.feed_parts(q, k, v, [2000, 1])[-1] - want).norm() / want.norm())

    few, many, best = error("magicpig", bits=4, tables=3), error("magicpig", bits=4, tables=40), error("oracle")
    assert many < 0.5 * few
    assert many < 0.5 * best


# ---------------------------------------------------------------- the index


def test_second_turn_and_chunks_hash_as_one_prompt():
    """Every prompt counts all keys from the mean of all keys: prompts, answers and chunks before it included."""
    past, states = Past(90, 0, 1, [90], 7, True), []
    for sizes in ([90], [50, *[1] * 10, 30], [20, 20, 50], [*[1] * 60, 30]):
        past.sizes = sizes
        layer = past.fill(small("magicpig", **HYPER))
        end = int(layer.state.lengths.ring_begin[0])
        states.append((layer.state.signatures.codes[..., SINK:end], layer.state.signatures.centre))
    for state in states[1:]:
        for got, want in zip(state, states[0]):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_keys_with_a_large_mean_are_told_apart(kind):
    """Without a centre all codes would be equal."""
    past = Past(60, 0, 1, [60], 1, False)
    past.k += 100.0
    with use_kernels(kind):
        found = past.fill(small("magicpig", **HYPER)).state.signatures.codes[:, :, :, SINK : 60 - WINDOW]
    assert float((found == found[..., :1]).float().mean()) < 0.4


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_with_only_padding_in_a_chunk_are_not_hashed(kind):
    past = Past(60, 30, 1, [25, 35], 5, True)
    with use_kernels(kind):
        both = past.fill(small("magicpig", **HYPER)).state.signatures
        alone = Layer(small("magicpig", **HYPER), batch=1, device=DEVICE)
        alone.feed(past.q[:1, :, 30:], past.k[:1, :, 30:], past.v[:1, :, 30:])
    for got, want in zip(both, alone.state.signatures):
        torch.testing.assert_close(got[:1], want)


# ---------------------------------------------------------------- needles, sizes, refusals


@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_key_is_found(where):
    assert LENGTH == 160
    assert finds(small("magicpig", budget=64, bits=4, tables=40), *PLANTED[where])


def test_index_takes_two_bytes_a_token_and_table():
    found = make_method("magicpig").buffers(Geometry(2, 3, 128, 4096, torch.bfloat16))["signatures"]
    assert found.codes.nbytes == 2 * 150 * 2 * 3 * 4096


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        (dict(bits=0), "magicpig: bits must be from 1 to 15, got 0"),
        (dict(bits=16), "magicpig: bits must be from 1 to 15, got 16"),
        (dict(tables=1), "magicpig: tables must be from 2 to 1024, got 1"),
        (dict(seed=1 << 16), "magicpig: seed must be from 0 to 65535, got 65536"),
        (
            dict(estimate_rest=True),
            "magicpig: estimate_rest cannot be True: this method estimates what it does not retrieve by its "
            "sample",
        ),
        (
            dict(prefetch_async=0.8),
            "magicpig: prefetch_async is for methods that select at every step and move no token, got 0.8: leave it "
            "out",
        ),
    ],
)
def test_wrong_hyper_parameters_are_refused(hyper, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        make_method("magicpig", **hyper)
