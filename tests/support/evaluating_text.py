"""A tiny model with a tokenizer and a text, and the options to evaluate them."""
from pathlib import Path

import pytest
from byte_tokenizer import bytes_tokenizer
from models import tiny

from torchsparsekv_benchmarks.quality.text_options import Options

LENGTH, STEPS, SINK, WINDOW = 96, 12, 8, 16
SAID = "".join(f"{i * i % 97}, {i % 7} and then {i}; " for i in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A llama with random weights, a tokenizer of bytes that begins with <bos>, and a text."""
    out, tokenizer = tmp_path_factory.mktemp("lm"), bytes_tokenizer()
    model = tiny(vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=0.4)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "said.txt").write_text(SAID)
    return out


def options(folder: Path, **given) -> Options:
    small = dict(
        model=str(folder), texts=(str(folder / "said.txt"),), lengths=(LENGTH,), steps=STEPS, budgets=(16,), samples=3,
        probe=3, batch=2, sink=SINK, window=WINDOW, skip_layers=0, methods=("full", "streaming", "quest"),
        hyper=("streaming.block_size=1", "quest.block_size=4"), device="cpu",
    )  # fmt: skip
    return Options(**{**small, **given})
