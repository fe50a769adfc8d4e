"""Selections written out literally in plain Python."""
import torch


def round_robin(scores: torch.Tensor, ids: torch.Tensor, n: int) -> list[int]:
    """The union of the pages of one group of query heads, by the definition."""
    ranked = [sorted((x for x in head.tolist() if x >= 0), key=lambda x: (-s[x], x)) for head, s in zip(ids, scores)]
    taken: list[int] = []
    for rank in range(n):
        for head in ranked:
            if rank < len(head) and head[rank] not in taken:
                taken.append(head[rank])
    return taken[:n] + [-1] * (n - len(taken))


def chosen(votes, most: int, kernel: int, pooling: str, sink: int = 0) -> list[int]:
    """By hand: neighbours that there are not count as zeros in a mean, and not at all in a maximum."""
    half, scores = kernel // 2, {}
    for i in range(sink, len(votes)):
        near = votes[max(0, i - half) : i + half + 1]
        scores[i] = float(near.max()) if pooling == "maxpool" else float(near.sum()) / kernel
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:most])
