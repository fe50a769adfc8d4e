"""Muon (Jordan et al., 2024) for the matrices and AdamW for the rest, stepped together."""
from collections import defaultdict

import torch
from torch import Tensor, nn

STEPS = 5


def orthogonal(g: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of g [n, rows, columns], by the quintic iteration in bf16."""
    x = g.bfloat16() if g.is_cuda else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(STEPS):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Optimizer:
    """Parameters of one shape are stepped as one stack: a model of six layers has five stacks."""

    def __init__(self, model: nn.Module, *, muon: float, adam: float, momentum: float = 0.95, decay: float = 0.05):
        self.muon, self.momentum, self.decay = muon, momentum, decay
        stacks: dict[tuple, list[Tensor]] = defaultdict(list)
        rest = []
        for name, p in model.named_parameters():
            if p.ndim == 2 and "embed" not in name and muon:
                stacks[tuple(p.shape)].append(p)
            else:
                rest.append(p)
        self.stacks = [(ps, torch.zeros_like(torch.stack(ps))) for ps in stacks.values()]
        self.adam = torch.optim.AdamW(
            [{"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
             {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0}],
            lr=adam, betas=(0.9, 0.98), fused=True,
        )  # fmt: skip
        self.peak = adam

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One step at `scale` times the peak rates; takes the gradients away."""
        for group in self.adam.param_groups:
            group["lr"] = self.peak * scale
        self.adam.step()
        for params, velocity in self.stacks:
            g = torch.stack([p.grad for p in params])
            velocity.lerp_(g, 1 - self.momentum)
            update = orthogonal(g.lerp_(velocity, self.momentum))  # Nesterov
            rows, columns = params[0].shape
            rate = self.muon * scale
            torch._foreach_mul_(params, 1 - rate * self.decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-rate * max(1.0, rows / columns) ** 0.5)
            for p in params:
                p.grad = None
        self.adam.zero_grad(set_to_none=True)
