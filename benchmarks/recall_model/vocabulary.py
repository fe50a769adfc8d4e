"""The 1024 words of the recall model: marks, words of keys, words of values, and those of running text."""

MARKS = (
    "<pad>", "<bos>", "<eos>", ".", ",", ":", "ask", "all", "many", "link", "trace", "list", "top",
    "<13>", "<14>", "<15>",
)  # fmt: skip
PAD, BOS, EOS, END, COMMA, COLON, ASK, ALL, MANY, LINK, TRACE, LIST, TOP = range(13)
KEYS = range(16, 272)
VALUES = range(272, 528)
TEXT = range(528, 1024)
SIZE = 1024


def names() -> list[str]:
    """The word of every token id."""
    classes = (("k", KEYS), ("v", VALUES), ("w", TEXT))
    return [*MARKS, *(f"{letter}{i:03d}" for letter, ids in classes for i in range(len(ids)))]
