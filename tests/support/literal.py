"""Selections written out literally in plain Python."""
import torch


def by_turns(scores: torch.Tensor, ids: torch.Tensor, n: int) -> list[int]:
    """Of the heads of one group, literally."""
    ranked = [sorted((x for x in own.tolist() if x >= 0), key=lambda x: (-s[x], x)) for own, s in zip(ids, scores)]
    taken: list[int] = []
    for turn in range(n):
        for own in ranked:
            if turn < len(own) and own[turn] not in taken:
                taken.append(own[turn])
    return taken[:n] + [-1] * (n - len(taken))


def chosen(votes, most: int, kernel: int, pooling: str, sink: int = 0) -> list[int]:
    """By hand: neighbours that there are not count as zeros in a mean, and not at all in a maximum."""
    half, scores = kernel // 2, {}
    for i in range(sink, len(votes)):
        near = votes[max(0, i - half) : i + half + 1]
        scores[i] = float(near.max()) if pooling == "maxpool" else float(near.sum()) / kernel
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:most])
