"""Samples of texts: stretches of tokens, one after the other."""
import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchsparsekv_benchmarks.quality.text_options import Options, name_of, path_of


@dataclass(frozen=True)
class Text:
    """All tokens of a text, and what a stretch of it begins with (<bos> where the tokenizer has it so)."""

    name: str
    digest: str
    ids: Tensor = field(repr=False)
    first: tuple[int, ...] = ()

    def rows(self, length: int, samples: range) -> Tensor:
        """Stretches of length + 1 tokens, [samples, length + 1]: the last one is only a target."""
        size = length + 1 - len(self.first)
        rows = torch.stack([self.ids[i * size : (i + 1) * size] for i in samples])
        return torch.cat([torch.tensor(self.first, dtype=rows.dtype).expand(len(rows), -1), rows], 1)

    def room(self, length: int) -> int:
        """How many samples it has."""
        return len(self.ids) // (length + 1 - len(self.first))


def read(o: Options, tokenizer: Any) -> list[Text]:
    """The texts, each long enough for all its samples."""
    texts = [read_one(text, tokenizer) for text in o.texts]
    longest = max(o.lengths)
    for text in texts:
        check_room(text, longest, o.samples)
    return texts


def check_room(text: Text, length: int, samples: int) -> None:
    """Refuse a text that is too short for `samples` samples."""
    if text.room(length) < samples:
        raise ValueError(
            f"{text.name} has {len(text.ids)} tokens, {samples} samples of {length} and a target each need "
            f"{samples * (length + 1)}: name a longer text, or fewer or shorter samples"
        )


def read_one(name: str, tokenizer: Any) -> Text:
    data = path_of(name).read_bytes()
    try:
        said = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path_of(name)} is not a text in UTF-8: {e}") from e
    ids = tokenizer(said, add_special_tokens=False, verbose=False)["input_ids"]  # verbose: longer than any prompt
    begins = tokenizer("a")["input_ids"][:1]
    first = tuple(begins) if begins == [tokenizer.bos_token_id] else ()
    return Text(name_of(name), hashlib.sha256(data).hexdigest()[:16], torch.tensor(ids, dtype=torch.int64), first)
