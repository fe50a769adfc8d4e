"""Plain-text tables."""
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Columns as wide as they need; the first `left` columns are left-aligned, the others right-aligned."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
