"""ParisKV equals the definitions of its paper, written a second time as plainly as possible."""
import math

import pytest
import torch
from kernels import until
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from world import integers

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.pariskv._code import directions
from torchsparsekv.ops.pariskv._lloyd_max import polynomial, quantiser
from torchsparsekv.ops.pariskv._srht import rotate
from torchsparsekv.ops.pariskv.centroid_votes import MILLION, centroid_votes, rotated_query, scale_of
from torchsparsekv.ops.pariskv.encode_keys import encode
from torchsparsekv.ops.pariskv.rank_by_votes import candidate_capacity, candidates_of, rank_by_votes
from torchsparsekv.ops.pariskv.rerank import rerank
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths

CPU = torch.device("cpu")
as_reranked = lambda q, heads, mean: rotated_query(q, heads, mean, 0) * scale_of(q, heads, mean)  # noqa: E731
SMALL = dict(budget=8, sink=4, window=6, update_interval=5, full_threshold=0)


def clustered(n: int, d: int, g: torch.Generator) -> torch.Tensor:
    """Keys as models have them: a common offset with outlier channels, clusters, a decaying spectrum."""
    basis = torch.linalg.qr(torch.randn(d, d, generator=g)).Q
    spectrum = torch.arange(1, d + 1).float() ** -0.5 * 4
    draw = lambda *shape: torch.randn(*shape, d, generator=g) * spectrum @ basis  # noqa: E731
    centres = draw(32)
    offset = draw()
    offset[torch.randperm(d, generator=g)[:4]] += 12
    return offset + centres[torch.randint(32, (n,), generator=g)] + 0.6 * draw(n)


# ---------------------------------------------------------------- the pieces


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 256])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_rotation_is_orthogonal(dim, seed):
    rotation = rotate(torch.eye(dim), seed)
    size = rotation.shape[1]
    assert size == 1 << (dim - 1).bit_length()
    torch.testing.assert_close(rotation @ rotation.T / size, torch.eye(dim), atol=1e-5, rtol=0)
    assert not torch.equal(rotation, rotate(torch.eye(dim), seed + 1))


@pytest.mark.parametrize("m", [2, 4, 8, 16])
def test_levels_are_the_lloyd_max_quantiser_of_the_beta_density(m):
    """|u_j| with u_j^2 ~ Beta(1/2, (m-1)/2), integrated by brute force on a grid that is uniform in the angle."""
    thresholds, levels = quantiser(m)
    angle = (torch.arange(4_000_000, dtype=torch.float64) + 0.5) / 4_000_000 * math.pi / 2
    x, density = angle.sin(), angle.cos() ** (m - 2)  # (1 - x^2)^((m-3)/2) dx
    cell = torch.bucketize(x, torch.tensor(thresholds, dtype=torch.float64))
    mass = torch.zeros(8, dtype=torch.float64).scatter_add_(0, cell, density)
    means = torch.zeros(8, dtype=torch.float64).scatter_add_(0, cell, density * x) / mass
    torch.testing.assert_close(torch.tensor(levels, dtype=torch.float64), means, atol=1e-4, rtol=0)
    middle = torch.tensor(levels, dtype=torch.float64).unfold(0, 2, 1).mean(-1)
    torch.testing.assert_close(torch.tensor(thresholds, dtype=torch.float64), middle, atol=1e-9, rtol=0)
    t = torch.arange(8) - 3.5
    by_polynomial = sum(c * t**i for i, c in enumerate(polynomial(m)))
    torch.testing.assert_close(by_polynomial, torch.tensor(levels), atol=1e-6, rtol=0)


def test_levels_agree_with_samples_of_the_sphere():
    g = torch.Generator().manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(400_000, 8, generator=g), dim=-1).abs().flatten()
    cell = torch.bucketize(x, torch.tensor(quantiser(8)[0]))
    means = torch.zeros(8).scatter_add_(0, cell, x) / cell.bincount(minlength=8)
    torch.testing.assert_close(means, torch.tensor(quantiser(8)[1]), atol=1e-3, rtol=0)


def test_metadata_is_112_bytes_a_token():
    codes = make_method("pariskv").buffers(Geometry(2, 3, 128, 4096, torch.bfloat16))["codes"]
    assert sum(b.nbytes for b in (codes.ids, codes.codes, codes.weights)) == 112 * 2 * 3 * 4096
    assert codes.ids.shape[-1] == 16


# ---------------------------------------------------------------- the estimator


def encoded(keys, m=8) -> Codes:
    """Of keys [batch, kv_heads, tokens, head_dim], and how often each id occurs among them."""
    ids, codes, weights = encode(keys, m, 0)
    counts = torch.nn.functional.one_hot(ids.long(), 1 << m).sum(2).to(torch.int32)
    return Codes(ids, codes, weights, counts)


def estimates(codes, q):
    every = torch.arange(codes.ids.shape[2], dtype=torch.int32)[None, None]
    return rerank(as_reranked(q[None, None, None], 1, True), codes, every)[0][0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("kind", ["random", "clustered"])
def test_estimate_correlates_with_the_inner_product(kind, dim, dtype):
    g = torch.Generator().manual_seed(3)
    keys = (torch.randn(4096, dim, generator=g) if kind == "random" else clustered(4096, dim, g)).to(dtype)
    codes, correlations, errors, biases = encoded(keys[None, None]), [], [], []
    for i in range(8):
        q = (keys[i].float() + torch.randn(dim, generator=g)).to(dtype)
        true, got = keys.float() @ q.float(), estimates(codes, q)
        correlations.append(float(torch.corrcoef(torch.stack([got, true]))[0, 1]))
        errors.append(float((got - true).abs().mean() / true.abs().mean()))
        biases.append(float((got - true).mean() / true.abs().mean()))
    bias = max(map(abs, biases))
    print(f"{kind} {dim} {dtype}: correlation {min(correlations):.4f}, error {max(errors):.4f}, bias {bias:.4f}")
    assert min(correlations) >= 0.98
    assert max(errors) <= 0.12
    assert bias <= 0.03


def test_zero_keys_and_huge_keys_have_finite_metadata():
    keys = torch.zeros(3, 128)
    keys[1], keys[2, 5] = 1e4, 6e4
    _, _, weights = encode(keys, 8, 0)
    assert weights.isfinite().all()
    assert (weights[0] == 0).all()


def test_stage_two_ranks_like_a_plain_sum():
    """Equation 24 for one candidate at a time, from the bits."""
    g = torch.Generator().manual_seed(5)
    keys, q = clustered(300, 128, g), torch.randn(1, 4, 1, 128, generator=g)
    index, levels = encoded(keys[None, None]), quantiser(8)[1]
    _, codes, weights, _ = (t[0, 0] for t in index)
    candidates = torch.randperm(300, generator=g)[:90].sort().values
    for mean in (True, False):
        rotated = as_reranked(q, 1, mean)
        plain = []
        for i in candidates.tolist():
            per_query = []
            for x in rotated[0, 0].tolist():
                total = 0.0
                for j, coordinate in enumerate(x):
                    nibble = int(codes[i, j // 2]) >> (4 * (j % 2)) & 15
                    sign = 1 if nibble >= 8 else -1
                    total += float(weights[i, j // 8]) * sign * levels[nibble & 7] * coordinate
                per_query.append(total)
            plain.append(max(per_query))
        got, _ = rerank(rotated, index, candidates[None, None].to(torch.int32))
        plain = torch.tensor(plain)
        room = 1.5e-4 * float(keys.norm(dim=-1).max() * q.norm(dim=-1).max())  # directions and queries are fp16
        torch.testing.assert_close(got[0, 0], plain, atol=room, rtol=0)
        ranked = plain[got[0, 0].argsort(descending=True)]
        torch.testing.assert_close(ranked, plain.sort(descending=True).values, atol=2 * room, rtol=0)
        assert room < 0.015 * float(plain.std())  # so the order is that of the plain sums but for near ties


# ---------------------------------------------------------------- stage I


def brute_force(rotated, ids, sink, end, beta, rho, least, dense):
    """Equation 15, key by key: `rotated` [queries, dim], `ids` [rows, subspaces] of one head."""
    n = end - sink
    m = rotated.shape[1] // ids.shape[1]
    names = ids[sink:end].tolist()
    totals = []
    for x in rotated.tolist():
        total = [0] * n
        for b in range(ids.shape[1]):
            part = x[b * m : b * m + m]
            proxy = [sum(c if name[b] >> j & 1 else -c for j, c in enumerate(part)) for name in names]
            for i in range(n):
                before = sum(p > proxy[i] for p in proxy)
                for weight, percent in zip((6, 5, 4, 3, 2, 1), (5, 15, 30, 50, 75, 100)):
                    if before < math.ceil(n * rho * percent / (100 * MILLION)):
                        total[i] += weight
                        break
        totals.append(total)
    score = [max(t) for t in zip(*totals)]
    count = n if n <= dense else min(n, max(math.ceil(n * beta / MILLION), least))
    best = sorted(range(n), key=lambda i: (-score[i], i))[:count]
    return sorted(sink + i for i in best)


@pytest.mark.parametrize("m", [8, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("beta", "rho"), [(100_000, 200_000), (250_000, 300_000), (MILLION, MILLION)])
def test_stage_one_equals_equation_15(beta, rho, queries, m):
    g = torch.Generator().manual_seed(queries + m)
    heads, rows, dim, sink = 2, 200, 32, 3
    ends = [200, 131, 4, 3, 3 + 64]
    keys = torch.stack([clustered(heads * rows, dim, g).view(heads, rows, dim) for _ in ends])
    codes, lengths = encoded(keys, m), until(ends, sink)
    q = integers(torch.randn(len(ends), heads * queries, 1, dim, generator=g))
    codes.counts.zero_()
    for b, h, i in ((b, h, i) for b, end in enumerate(ends) for h in range(heads) for i in range(sink, end)):
        codes.counts[b, h, torch.arange(dim // m), codes.ids[b, h, i].long()] += 1
    ratios = [10, MILLION, MILLION, 20, MILLION, MILLION, 70, 500_000, 500_000, beta, rho]
    for least, dense in ((0, 0), (20, 0), (5, 64)):
        capacity = candidate_capacity(rows, ratios, least, dense)
        rotated, votes = centroid_votes(q, codes, lengths, ratios, False, 0)
        got = rank_by_votes(votes, codes, lengths, ratios, least, dense, capacity)
        rotated = (rotated * dim**0.5).round()  # sums of integers, scaled
        for b, end in enumerate(ends):
            n = end - sink
            share = (beta, rho) if n >= 70 else (500_000, 500_000) if n >= 20 else (MILLION, MILLION)
            for h in range(heads):
                want = brute_force(rotated[b, h], codes.ids[b, h], sink, end, *share, least, dense)
                assert len(want) == candidates_of(n, ratios, least, dense)
                assert got[b, h].tolist() == want + [-1] * (capacity - len(want))


# ---------------------------------------------------------------- the method over time


def driven(method, lengths, steps, *, heads=2, group=2, dim=32, rows=96, dtype=torch.float32):
    """Prompts of `lengths` tokens (0: none), then `steps` decode steps; yields (state, keys, q, chosen) after each."""
    g = torch.Generator().manual_seed(0)
    batch = len(lengths)
    of_rows = RowLengths(method.ring_plan, batch, rows, CPU)
    s = LayerState(method.buffers(Geometry(batch, heads, dim, rows, dtype)), of_rows, CPU, pool_on_host=False)
    chosen = []
    s.on_step = lambda state, q, a, choice, out: chosen.append(choice.ids)
    draw = lambda h, n: torch.randn(batch, h, n, dim, generator=g).to(dtype)  # noqa: E731
    columns = max(lengths)
    keys = [[] for _ in lengths]
    if columns:
        of_rows.left_pad.copy_(torch.tensor([columns - n for n in lengths]))
        of_rows.advance(columns)
        k = draw(heads, columns)
        method.prefill(s, draw(heads * group, columns), k, draw(heads, columns), Attention(dim**-0.5), last=True)
        for b, n in enumerate(lengths):
            keys[b] += k[b, :, columns - n :].unbind(1)
    for _ in range(steps):
        of_rows.advance(1)
        q, k = draw(heads * group, 1), draw(heads, 1)
        for b in range(batch):
            keys[b].append(k[b, :, 0])
        method.decode(s, q, k, draw(heads, 1), Attention(dim**-0.5))
        yield s, keys, q, chosen.pop()


@pytest.mark.parametrize("dim", [32, 48])
@pytest.mark.parametrize("lengths", [[0, 0], [1, 10, 11], [31, 12, 60]])
def test_index_covers_exactly_the_retrievable_keys_at_every_step(lengths, dim):
    """From nothing past several update intervals, ragged: ids, codes, weights and counts as if encoded in one go."""
    method = make_method("pariskv", **SMALL, beta=0.5, rho=0.6)
    for s, keys, _, chosen in driven(method, lengths, 33, dim=dim):
        for b in range(len(lengths)):
            n, end = len(keys[b]), int(s.lengths.ring_begin[b])
            assert end == 4 + max(0, (n - 10) // 5) * 5
            if end == 4:
                assert (chosen[b] == -1).all()
                assert (s.codes.counts[b] == 0).all()
                continue
            ids, codes, weights = encode(torch.stack(keys[b][4:end], 1), 8, 0)
            assert all(torch.equal(got[b, :, 4:end], x) for got, x in zip(s.codes[:3], (ids, codes, weights)))
            tally = torch.nn.functional.one_hot(ids.long(), 256).sum(1)
            assert torch.equal(s.codes.counts[b].long(), tally)
            for h in range(2):
                picked = chosen[b, h][chosen[b, h] >= 0].tolist()
                assert picked == sorted(set(picked))
                assert len(picked) == min(8, end - 4)
                assert picked[0] >= 4
                assert picked[-1] < end


@pytest.mark.parametrize("group", ["mean", "max"])
def test_chosen_tokens_are_the_best_estimates_among_the_candidates(group):
    method = make_method("pariskv", **SMALL, beta=0.5, rho=0.6, group=group)
    for s, _, q, chosen in driven(method, [80, 47], 3):
        rotated = as_reranked(q, 2, group == "mean")
        for b in range(2):
            end = int(s.lengths.ring_begin[b])
            for h in range(2):
                ids, codes, weights, _ = (t[b, h] for t in s.codes)
                some = brute_force(rotated[b, h], ids, 4, end, MILLION // 2, 6 * MILLION // 10, 8, 0)
                v = directions(codes[some], 8) * weights[some].float()[..., None]
                estimate = (v.flatten(-2) @ rotated[b, h].T).amax(-1)
                best = estimate.topk(8).indices.sort().values
                assert [some[i] for i in best.tolist()] == chosen[b, h].tolist()


def test_rows_below_the_dense_threshold_take_everything():
    method = make_method("pariskv", **{**SMALL, "full_threshold": 50}, beta=0.5, rho=0.6)
    assert method.dense_up_to == 40
    for s, _, _, chosen in driven(method, [20, 49, 80], 4):
        assert chosen.shape[-1] == 40
        for b, end in enumerate(s.lengths.ring_begin.tolist()):
            want = list(range(4, end)) if end - 4 <= 40 else None
            for h in range(2):
                got = [x for x in chosen[b, h].tolist() if x >= 0]
                assert got == want if want is not None else len(got) == 8


# ---------------------------------------------------------------- in a model


@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("hyper", [dict(budget=MAX_LENGTH, beta=1, rho=1), dict(budget=8, full_threshold=MAX_LENGTH)])
def test_all_tokens_is_dense_at_any_head_dim(head_dim, hyper):
    model = tiny(head_dim=head_dim)
    ids, mask = prompts(3, 60)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, "pariskv", max_length=MAX_LENGTH, skip_layers=1, **{**SMALL, **hyper}) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(3))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_small_budget_rows_of_a_batch_are_independent(group):
    model = tiny()
    ids, mask = prompts(3, 67)
    small = dict(max_length=MAX_LENGTH, skip_layers=1, **SMALL, beta=0.3, rho=0.4, group=group)
    with torchsparsekv.patch(model, "pariskv", **small) as handle:
        together = greedy_logits(model, ids, mask, 12, handle.make_cache(3))
        pad = int((mask[1] == 0).sum())
        same, cache = ids[1:2, pad:].expand(3, -1), handle.make_cache(3)
        alone = greedy_logits(model, same, torch.ones_like(same), 12, cache)
        assert handle.report().layers[1].blocks_selected > 0
    torch.testing.assert_close(together[1], alone[1], atol=1e-4, rtol=1e-4)


def test_compiled_step_equals_eager_on_both_sides_of_the_dense_threshold():
    """One row below the threshold, one that crosses it, one above: one graph, the same logits."""
    model = tiny(num_hidden_layers=2)
    ids, mask = prompts(3, 67)
    hyper = dict(max_length=MAX_LENGTH, skip_layers=1, **{**SMALL, "full_threshold": 60}, beta=0.3, rho=0.5)
    torch._dynamo.utils.counters.clear()
    with torchsparsekv.patch(model, "pariskv", **hyper) as handle:
        want = greedy_logits(model, ids, mask, 20, handle.make_cache(3))
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(3), torch.compile(model.forward, fullgraph=True))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_defaults_of_the_patch():
    model = tiny()
    with torchsparsekv.patch(model, "pariskv", max_length=512, skip_layers=1) as handle:
        assert handle.planned.method.budget == 512, "a default is clamped to the row"
    with torchsparsekv.patch(model, "quest", max_length=512, skip_layers=1, budget=512) as handle:
        assert (handle.planned.method.sink, handle.planned.method.window) == (64, 256)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("hyper", "reason"),
    [
        (dict(rho=0.1, beta=0.2), "rho 0.1 is below beta 0.2"),
        (dict(beta=0.4), "rho 0.3 is below beta 0.4 in contexts below 10000"),
        (dict(rho=1.5), "rho must be None or in"),
        (dict(beta=0), "beta must be None or in"),
        (dict(update_interval=0), "update_interval must be at least 1"),
        (dict(m=16), "m must be one of 2, 4, 8"),
        (dict(m=3), "m must be one of 2, 4, 8"),
        (dict(group="sum"), "group must be one of mean, max"),
        (dict(full_threshold=-1), "full_threshold must be at least 0"),
        (dict(seed=1 << 20), "seed must be from 0 to 1048575, got 1048576"),
    ],
)
def test_wrong_hyper_parameters_are_refused(hyper, reason):
    with pytest.raises(ValueError, match=reason):
        make_method("pariskv", **hyper)


def test_block_size_is_refused():
    with pytest.raises(TypeError, match="method 'pariskv' has no hyper-parameter block_size; it has: budget, "):
        make_method("pariskv", block_size=4, sink=64, budget=100)


def test_budget_above_the_candidates_is_refused():
    g = Geometry(1, 1, 128, 8192, torch.float32)
    with pytest.raises(ValueError, match=r"budget 2000 is above the 788 candidates that beta .* leaves of 7872 tokens"):
        make_method("pariskv", budget=2000, beta=0.1, rho=0.2).buffers(g)
    make_method("pariskv", budget=700, beta=0.1, rho=0.2).buffers(g)


@pytest.mark.parametrize(
    ("m", "head_dim", "reason"),
    [(2, 128, "m 2 makes 64 subspaces of head_dim 128"), (8, 3, "m 8 does not divide 4, head_dim")],
)
def test_m_that_does_not_divide_the_head_dim_is_refused(m, head_dim, reason):
    with pytest.raises(ValueError, match=reason):
        make_method("pariskv", m=m).buffers(Geometry(1, 1, head_dim, 512, torch.float32))
