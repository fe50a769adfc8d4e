"""Teacher-forced decoding: every method gets the true tokens, and its next-token distribution is compared with that of
the dense model. The logits of the dense model are kept at the scored positions alone: batch x steps x vocabulary."""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MEASURES = ("kl", "nats", "agrees")


@dataclass(frozen=True)
class Forced:
    """Of each sample and step: KL(dense || method) in nats, the method's -log p of the true token, and whether both
    expect the same token most. [samples, steps] each, on the CPU."""

    kl: Tensor
    nats: Tensor
    agrees: Tensor


@torch.no_grad()
def dense_logits(model, ids: Tensor, steps: int) -> Tensor:
    """What the unpatched model says of the last `steps` tokens, by one forward: [samples, steps, vocabulary]."""
    return model(ids[:, :-1], use_cache=False, logits_to_keep=steps).logits


def against(teacher: Tensor, said: Tensor, target: Tensor) -> Tensor:
    """The measures of one step, [3, samples], in float64: KL of almost equal distributions is a small difference."""
    p, q = (x.double().log_softmax(-1) for x in (teacher, said))
    nats = -q.gather(-1, target[:, None])[:, 0]
    return torch.stack([(p.exp() * (p - q)).sum(-1), nats, (teacher.argmax(-1) == said.argmax(-1)).double()])


def of_the_teacher(teacher: Tensor, ids: Tensor) -> Forced:
    """The dense model held against itself: its perplexity."""
    steps = teacher.shape[1]
    return _forced([against(teacher[:, t], teacher[:, t], ids[:, t - steps]) for t in range(steps)])


@torch.no_grad()
def ingest(model, ids: Tensor, steps: int, cache) -> None:
    """All but the scored steps as a prompt. Its own last logits are exact whatever the method, so the first token that
    is scored is the one after it."""
    model(ids[:, : ids.shape[1] - 1 - steps], past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def steps_through(
    model, ids: Tensor, teacher: Tensor, cache, before: Callable[[int], None] | None = None,
    step: Callable | None = None,
) -> Forced:  # fmt: skip
    """The scored steps, one by one. `before` gets the number of each step before the step is taken. `step` stands in
    for the model, as replay.stepper() makes it."""
    steps, out = teacher.shape[1], []
    for t in range(steps):
        at = ids.shape[1] - 1 - steps + t
        if before is not None:
            before(t)
        token = ids[:, at : at + 1]
        if step is None:
            said = model(token, past_key_values=cache).logits[:, -1]
        else:
            said = step(token, torch.full_like(token, at))
        out.append(against(teacher[:, t], said, ids[:, at + 1]))
    return _forced(out)


def _forced(steps: list[Tensor]) -> Forced:
    return Forced(*torch.stack(steps, -1).cpu())
