"""Code that scripts on a recorded model share: options, a forward of each text, and the result file."""
import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks.quality import replay, texts
from torchsparsekv_benchmarks.quality.pretrained import pretrained


def parser(about: str | None, tokens: int | None = None, model: str = "qwen-0.5b") -> argparse.ArgumentParser:
    """With the option --tokens, if there is a default for it."""
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default=model)
    p.add_argument("--texts", default="moby-dick,sympy")
    p.add_argument("--out", type=Path, required=True)
    if tokens is not None:
        p.add_argument("--tokens", type=int, default=tokens)
    return p


def recorded(
    o: argparse.Namespace, tokens: int, methods: Iterable[str] = ()
) -> Iterator[tuple[str, Any, dict[int, replay.Prompted]]]:
    """(text, model, its layers after one forward of `tokens` tokens) for each text, in fp32 on the CPU."""
    tokenizer, model = pretrained(o.model, torch.device("cpu"), torch.float32)
    for text in o.texts.split(","):
        ids = texts.read_one(text, tokenizer).rows(tokens, range(1))[:, :tokens]
        yield text, model, replay.record(model, ids, torch.zeros(1, dtype=torch.int32), methods=methods).layers


def write(o: argparse.Namespace, name: str, rows: list[dict], **options: Any) -> None:
    """The file of results of benchmark `name`."""
    options = {"model": o.model, "texts": o.texts, **options}
    o.out.write_text(json.dumps(_results.header(name, options) | {"rows": rows}, indent=1) + "\n")
