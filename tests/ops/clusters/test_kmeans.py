"""K-means of cluster_keys: first centroids, inertia, and kernels at real sizes."""
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import clones, on
from world import DEVICE

from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.clusters import _kmeans, _kmeans_kernels
from torchsparsekv.ops.clusters.cluster_keys import WHOLE, Kmeans, cluster_keys
from torchsparsekv.ops.clusters.views import Units
from torchsparsekv.ops.store.views import KVStore, Lengths

KEYS, CLUSTERS, ROUNDS = 4096, 256, 3  # a whole stretch, as the methods have it
ENTRY = load_all()["cluster_keys"]


def none_yet(k: torch.Tensor, sink: int) -> Units:
    """Room for the units of these keys."""
    batch, heads, tokens, dim = k.shape
    first = torch.full((batch, heads, tokens + 1), sink, dtype=torch.int32)
    return Units(first, torch.zeros(batch, heads, tokens, dim), torch.zeros(batch, heads, dtype=torch.int32))


def times(start: list[int], length: list[int], ring_begin: list[int], sink: int) -> Lengths:
    start, length, ring_begin = (torch.tensor(t, dtype=torch.int32) for t in (start, length, ring_begin))
    return Lengths(start, length, torch.full_like(start, sink), ring_begin, sink, 1)


def keys_of(kind: str) -> torch.Tensor:
    """Keys of no structure; of 160 topics in turn; drifting; or most of 32 narrow topics, every 8th like no other."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(KEYS, 32, generator=g)
    if kind == "topics":
        return x * 0.7 + 3 * torch.randn(160, 32, generator=g)[torch.arange(KEYS) // 16 * 7 % 160]
    if kind == "rare":
        usual = x[:32].repeat(KEYS // 32, 1) + 0.2 * torch.randn(KEYS, 32, generator=g)
        return torch.where((torch.arange(KEYS) % 8 == 7)[:, None], x, usual)
    if kind == "drift":
        for t in range(1, KEYS):
            x[t] = 0.9 * x[t - 1] + 0.44 * x[t]
    return x


def inertia(x: torch.Tensor, seed: int) -> float:
    """Of the units that the op makes: squared distances of the keys from the mean of their unit."""
    k = x[None, None]
    k, units, lengths = on(DEVICE, (k, none_yet(k, 0), times([0], [KEYS], [KEYS], 0)))
    kmeans = Kmeans(KEYS // CLUSTERS, KEYS, ROUNDS, seed, False)
    order = cluster_keys(k, units, lengths, kmeans, True)[0, 0].long().cpu()
    assert int(units.unit_count) == CLUSTERS
    sizes = units.first[0, 0, : CLUSTERS + 1].diff().long().cpu()
    return float((x[order] - units.centroid[0, 0, :CLUSTERS].cpu().repeat_interleave(sizes, 0)).square().sum())


def plusplus(x: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """The start of k-means++: one key after another, with chances in proportion to the squared distance."""
    picks = [int(torch.randint(0, len(x), (1,), generator=g))]
    far = (x - x[picks[0]]).square().sum(1)
    while len(picks) < CLUSTERS:
        picks.append(int(torch.multinomial(far, 1, generator=g)))
        far = torch.minimum(far, (x - x[picks[-1]]).square().sum(1))
    return x[picks]


def plain_inertia(x: torch.Tensor, seed: int, rounds: int) -> float:
    """Of k-means as others have it: Lloyd's algorithm from the start of k-means++."""
    centres = plusplus(x, torch.Generator().manual_seed(seed))
    for _ in range(rounds):
        member = torch.nn.functional.one_hot(torch.cdist(x, centres).argmin(1), CLUSTERS).float().T
        count = member.sum(1, keepdim=True)
        centres = torch.where(count > 0, member @ x / count.clamp(min=1), centres)
    return float(torch.cdist(x, centres).amin(1).square().sum())


@pytest.mark.parametrize("kind", ["none", "topics", "drift", "rare"])
def test_inertia_is_that_of_plain_kmeans(kind):
    """Within 2 % of k-means++ with as many rounds, means of 3 seeds, whatever the keys are like."""
    x = keys_of(kind)
    plain = sum(plain_inertia(x, seed, ROUNDS) for seed in range(3))
    assert sum(inertia(x, seed) for seed in range(3)) <= 1.02 * plain


def test_centroids_begin_where_plain_kmeans_would_see_more():
    """One draw alone, by position, leaves what is rare in clusters of many: the bound above is not met by any start."""
    x = keys_of("rare")
    plain = plain_inertia(x, 0, ROUNDS)
    got = []
    for draws in (1, _kmeans.DRAWS):
        centres, name = _kmeans.kmeans(x[None], CLUSTERS, draws, ROUNDS, 0)
        got.append(float((x - centres[0, name[0]]).square().sum()) / plain)
    assert got[0] > 1.15
    assert got[1] < 1.05


def test_the_start_follows_the_seed():
    x = torch.randn(1, 200, 16, generator=torch.Generator().manual_seed(0))
    runs = [_kmeans.kmeans(x, 20, 8, 4, seed)[0] for seed in (3, 3, 4)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    for seed in range(5):
        assert (_kmeans.first_draw(200, 10, seed) // 20).tolist() == list(range(10)), "one of each part"


@given(keys=st.integers(1, 70), clusters=st.integers(1, 40), draws=st.integers(1, 16), seed=st.integers(0, 99))
def test_number_of_first_centroids_is_the_number_of_clusters(keys, clusters, draws, seed):
    """All different, where keys are."""
    clusters = min(keys, clusters)
    x = torch.randn(1, keys, 8, generator=torch.Generator().manual_seed(seed))
    begin = _kmeans.draw_centroids(x, clusters, draws, seed)[0]
    assert begin.shape == (clusters, 8)
    assert len(begin.unique(dim=0)) == clusters
    assert _kmeans.centroids_after(clusters, draws)[-1] == clusters


@pytest.mark.parametrize("seed", range(3))
def test_keys_become_first_centroids_in_proportion_to_distance(seed):
    """Of 1000 keys, 100 ten times as far as the others: of 60 that are drawn, half are of those."""
    far = torch.ones(1, 1000)
    far[0, 3::10] = 10
    taken = [_kmeans.later_draw(far, 60, draw, seed)[0].tolist() for draw in (1, 2)]
    assert taken[0] != taken[1], "every draw has hashes of its own"
    for some in taken:
        assert some == sorted(set(some))
        assert 18 <= sum(i % 10 == 3 for i in some) <= 42


@given(seed=st.integers(0, 999), kinds=st.integers(1, 5), keys=st.integers(1, 70), clusters=st.integers(1, 30))
def test_equal_keys_leave_no_cluster_empty(seed, kinds, keys, clusters):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, kinds, 8, generator=g)[:, torch.randint(0, kinds, (keys,), generator=g)]
    clusters = min(clusters, keys)
    centres, name = _kmeans.kmeans(x, clusters, 4, 3, seed)
    for h in range(2):
        assert torch.bincount(name[h], minlength=clusters).min() > 0
        for c in range(clusters):
            torch.testing.assert_close(centres[h, c], x[h, name[h] == c].mean(0))


@pytest.mark.parametrize(("size", "stretch", "tokens", "alike"), [(8, 128, 300, False), (2, 64, 150, True)])
def test_clustering_kernel_at_real_sizes(size, stretch, tokens, alike):
    """Several stretches and tiles, and with `alike` more clusters than different keys, so that many are repaired."""
    g = torch.Generator().manual_seed(size)
    k = torch.randn(2, tokens, 2, 32, generator=g)
    if alike:
        k = torch.randint(-1, 2, (2, 3, 2, 32), generator=g).float()[:, torch.randint(0, 3, (tokens,), generator=g)]
    lengths = times([0, 0], [tokens, tokens - 9], [tokens - 5, tokens - 20], 4)
    both_ways(k.transpose(1, 2), lengths, size, stretch)


@pytest.mark.parametrize(("cosine", "alike"), [(False, False), (True, False), (False, True)])
def test_whole_prompt_is_clustered(cosine, alike):
    """More keys than a power of two, rows of different lengths, one of which is left out; with `alike` repairs."""
    g = torch.Generator().manual_seed(4)
    k = torch.randn(3, 150, 2, 32, generator=g)
    if alike:
        k = torch.randint(-1, 2, (3, 3, 2, 32), generator=g).float()[:, torch.randint(0, 3, (150,), generator=g)]
    lengths = times([0, 0, 0], [150, 141, -1], [145, 130, 4], 4)
    both_ways(k.transpose(1, 2), lengths, 7, WHOLE, cosine)


def test_whole_prompt_equals_one_stretch_that_covers_the_prompt():
    """Where both begin at one draw, as they do with one cluster: its mean."""
    k = torch.randn(1, 1, 128, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for stretch in (128, WHOLE):
        units = none_yet(k, 0)
        order = cluster_keys(k, units, times([0], [128], [128], 0), Kmeans(128, stretch, 2, 0, True), True)
        found.append(tensors((order, units)))
    for a, b in zip(*found):
        assert torch.equal(a, b)


@pytest.mark.parametrize("centred", [False, True])
def test_clustering_kernel_by_cosine(centred):
    """Of a size that does not divide the stretch. The keys that stay in the ring are no part of the mean."""
    k = torch.randn(1, 150, 2, 32, generator=torch.Generator().manual_seed(8))
    k[:, 141:] += 40
    k *= torch.rand(1, 150, 2, 1, generator=torch.Generator().manual_seed(1)) + 0.2
    both_ways(k.transpose(1, 2) + 3, times([0], [150], [141], 4), 20, 64, True, centred)


def test_cosine_ignores_the_length_of_keys():
    """And after many rounds every key is with the mean it has the largest cosine with; what a unit is known by is the
    mean of its keys as they are."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(1, 400, 16, generator=g) + 3 * torch.randn(1, 5, 16, generator=g)[:, torch.arange(400) % 5]
    by_length = x * (0.1 + 4 * torch.rand(1, 400, 1, generator=g))
    centres, name = _kmeans.kmeans(by_length, 5, 4, 30, 0, True)
    assert torch.equal(name, _kmeans.kmeans(torch.nn.functional.normalize(x, dim=-1), 5, 4, 1, 0, True)[1])
    assert not torch.equal(name, _kmeans.kmeans(by_length, 5, 4, 30, 0, False)[1])
    means = torch.stack([by_length[0, name[0] == c].mean(0) for c in range(5)])
    torch.testing.assert_close(centres[0], means)
    assert torch.equal(torch.cosine_similarity(by_length[0, :, None], means, dim=-1).argmax(-1), name[0])


def test_random_draw_over_several_tiles(monkeypatch):
    """32 centroids a draw, where a tile has room for 16 keys of this width."""
    for module in (_kmeans, _kmeans_kernels):
        monkeypatch.setattr(module, "DRAWS", 2)
    k = torch.randn(1, 1, 128, 256, generator=torch.Generator().manual_seed(0))
    both_ways(k, times([0], [128], [128], 0), 2, 128)


def both_ways(
    k: torch.Tensor, lengths: Lengths, size: int, stretch: int, cosine: bool = False, centred: bool = False
) -> None:
    both = []
    for kind, device in (("reference", "cpu"), ("triton", DEVICE)):
        k, units, of_rows = on(device, clones((k, none_yet(k, lengths.sink), lengths)))
        order = ENTRY.run(kind, k, units, of_rows, Kmeans(size, stretch, 3, 5, cosine, centred), True)
        both.append([t.cpu() for t in tensors((order, units))])
    for got, want in zip(both[1], both[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("keys", [40, 33])
def test_tokens_leaving_the_ring_are_clustered_by_cosine(keys, centred):
    """Kernel and reference alike, and as many clusters as asked for."""
    g = torch.Generator().manual_seed(1)
    kinds = torch.nn.functional.normalize(torch.randn(4, 32, generator=g), dim=-1)
    k = kinds[torch.arange(60) % 4] * (1 + 4 * torch.rand(2, 60, 1, generator=g))
    k = k + 0.01 * torch.randn(2, 60, 32, generator=g) + 3.0 * centred
    rows = torch.stack([k, torch.randn(2, 60, 32, generator=g)], 2)[None]
    lengths = times([50], [51], [2 + keys], 2)._replace(interval=keys)
    both = []
    for kind, device in (("reference", "cpu"), ("triton", DEVICE)):
        store = KVStore(rows, torch.zeros(1, 2, 64, 2, 32))
        state = on(device, clones((store, none_yet(rows[:, :, :, 0], 2), lengths)))
        load_all()["cluster_ring"].run(kind, *state, Kmeans(keys // 4, keys, 20, 3, True, centred))
        both.append([t.cpu() for t in tensors(state)])
        ends = state[1].first[0, 0, :5].tolist()
        assert int(state[1].unit_count[0, 0]) == 4
        assert ends[-1] == 2 + keys
    for got, want in zip(both[1], both[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
