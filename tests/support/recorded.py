"""Statements in a prompt of the recall model."""
from torchsparsekv_benchmarks.recall_model.vocabulary import ALL, ASK, END, KEYS, VALUES


def records(ids: list[int]) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Values by key, of what is no question and no answer."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for i in range(1, len(ids) - 6):
        a, b, *value, end = ids[i : i + 7]
        statement = a in KEYS and b in KEYS and all(v in VALUES for v in value) and end == END
        if statement and ids[i - 1] not in (ASK, ALL) and ids[i - 1] not in KEYS:
            found.setdefault((a, b), []).append(tuple(value))
    return found
