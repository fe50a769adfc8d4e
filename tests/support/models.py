"""Tiny models and the ways of driving them."""
import torch
from families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM
from world import DEVICE

MAX_LENGTH = 128


def tiny(family: str = "llama", *, dtype=torch.float32, **overrides):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    return AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval()


def prompts(rows: int, length: int, *, seed: int = 1, ragged: bool = True):
    """Token ids and a left-padding mask; the last row has no padding."""
    ids = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    if ragged:
        for b in range(rows - 1):
            pad = (b * 7 + 5) % (length - 2)
            mask[b, :pad], ids[b, :pad] = 0, 0
    return ids.to(DEVICE), mask.to(DEVICE)


@torch.no_grad()
def greedy_logits(model, ids, mask, steps: int, cache, step=None):
    """Logits of the prompt's end and of `steps` more tokens, fed with a fixed continuation: all runs see the same."""
    step = step or model
    feed = torch.randint(3, 97, (ids.shape[0], steps), generator=torch.Generator().manual_seed(9)).to(ids.device)
    position = mask.cumsum(-1) - 1
    out = model(ids, attention_mask=mask, position_ids=position.clamp(min=0), past_key_values=cache)
    logits = [out.logits[:, -1].clone()]
    at = position[:, -1:]
    for t in range(steps):
        at = at + 1
        out = step(feed[:, t : t + 1].contiguous(), position_ids=at, past_key_values=cache)
        logits.append(out.logits[:, -1].clone())
    return torch.stack(logits, 1)


@torch.no_grad()
def dense_logits(model, ids, mask, steps: int):
    """What the unpatched model says: one forward over everything."""
    feed = torch.randint(3, 97, (ids.shape[0], steps), generator=torch.Generator().manual_seed(9)).to(ids.device)
    whole, all_mask = torch.cat([ids, feed], 1), torch.cat([mask, torch.ones_like(feed)], 1)
    position = (all_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(whole, attention_mask=all_mask, position_ids=position).logits
    return logits[:, ids.shape[1] - 1 :]
