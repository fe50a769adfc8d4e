"""Whether a selection is right, by scores that a test computed itself."""


def check_choice(chosen, scores: dict, n: int, slack: float):
    """Distinct retrievable pages, as many as may be, in order, none left out that is better (by more than rounding)."""
    ids = chosen[chosen >= 0].tolist()
    assert chosen.tolist() == ids + [-1] * (len(chosen) - len(ids)), "unused places stand at the end"
    assert ids == sorted(set(ids))
    assert set(ids) <= set(scores)
    assert len(ids) == min(n, len(scores))
    left = [scores[p] for p in scores if p not in ids]
    if left:
        assert min(scores[p] for p in ids) >= max(left) - slack
