"""Where models and samples come from: the project's recall model, or any Hugging Face model with RULER's tasks."""
import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchsparsekv_benchmarks.quality.options import RECALL, OnModel
from torchsparsekv_benchmarks.quality.pretrained import empty, opened


class Sample(Protocol):
    """A prompt of token ids and how to judge what decoding adds to it.

    It may have `depth`, where in the prompt 0..1 stands what is asked for, and `processor(device)`, a logits processor
    that steers the sampling of a text the model writes itself; without one decoding is greedy.
    """

    @property
    def prompt(self) -> list[int]: ...

    @property
    def new_tokens(self) -> int: ...

    def score(self, output: list[int]) -> float: ...


JOURNAL = "journal"  # the long generation: all that is asked for has come through the decode path
READOUT = "readout"  # the context-intensive one: 64 records of the prompt in one output


@dataclass(frozen=True)
class Source:
    """A model, and `sample(task, length, index)`, which gives the same sample whenever it is asked.

    weights: loads the model; until then `model` has none. None: it has its weights.
    """

    name: str
    kind: str
    model: Any
    tasks: tuple[str, ...]
    sample: Callable[[str, int, int], Sample]
    on_request: tuple[str, ...] = ()  # tasks that only run where they are named
    tokenizer: Any = None
    weights: Callable[[], Any] | None = None

    def loaded(self) -> "Source":
        return self if self.weights is None else dataclasses.replace(self, model=self.weights(), weights=None)

    def about(self) -> dict:
        """Which model this is, so that results of another one are never mixed in."""
        return about(self.name, self.model, self.kind)


def about(name: str, m, tasks: str) -> dict:
    return {
        "name": name, "tasks": tasks, "dtype": str(m.dtype).removeprefix("torch."), "device": m.device.type,
        "parameters": sum(p.numel() for p in m.parameters()), "weights": fingerprint(m),
    }  # fmt: skip


def fingerprint(model) -> str:
    """Of the first values of every parameter: other weights, or trained further, and it is another one."""
    digest = hashlib.blake2b(digest_size=8)
    for p in model.parameters():
        digest.update(p.detach().flatten()[:1024].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def load(o: OnModel) -> Source:
    return without_weights(o).loaded()


def without_weights(o: OnModel) -> Source:
    """For checks that come before the weights are loaded."""
    device, dtype = placed(o)
    return _recall(device, dtype) if o.model == RECALL else _hugging_face(o, device, dtype)


def placed(o: OnModel) -> tuple[torch.device, Any]:
    """Where a model is to be, and in which data type ("auto": as it is stored)."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if o.device == "auto" else o.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device is cuda, and torch finds no CUDA device")
    auto = "auto" if device.type == "cuda" else torch.float32
    return device, auto if o.dtype == "auto" else getattr(torch, o.dtype)


def _recall(device: torch.device, dtype) -> Source:
    from torchsparsekv_benchmarks.recall_model import journal, model, readout, tasks

    def sample(task: str, length: int, index: int) -> Sample:
        if task == READOUT:
            return readout.readout(length, index)
        if task != JOURNAL:
            return tasks.sample(task, length, index)
        prompt = len(journal.journal(length, index).prompt)
        return journal.journal(length - prompt, index)

    dtype = torch.bfloat16 if dtype == "auto" else dtype
    net = empty(model.config(), dtype)
    weights = lambda: model.load(device=device, dtype=dtype)[0].eval()  # noqa: E731
    return Source(RECALL, RECALL, net, tasks.TASKS, sample, on_request=(JOURNAL, READOUT), weights=weights)


def _hugging_face(o: OnModel, device: torch.device, dtype) -> Source:
    from torchsparsekv_benchmarks.quality import ruler, suite

    files = opened(o.model, o.yarn)
    prompts = ruler.Ruler(files.tokenizer, suite.TASKS)
    name = o.model if o.yarn == 1 else f"{o.model}, {o.yarn:g} times its positions by YaRN"
    return Source(
        name, "ruler", files.empty(dtype), ruler.TASKS, prompts.sample, on_request=tuple(suite.TASKS),
        tokenizer=files.tokenizer, weights=lambda: files.load(device, dtype),
    )  # fmt: skip
