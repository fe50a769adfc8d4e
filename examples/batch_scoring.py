"""Score how likely continuations of texts are: a padded batch, in which each continuation is decoded token by token.

    python examples/batch_scoring.py --model MODEL --pairs "a text|goes on;another text|and ends"

One forward over text and continuation together would be exact whatever the method, because prompts are exact. The loss
of a method shows in decode steps alone, so this script scores decode steps.
"""
import torch
from common import METHOD, load, options

import torchsparsekv

o = options(
    __doc__.splitlines()[0], pairs="w001 w002 w003 w004 w005|w006 w007;w008 w009|w010", budget=128, method=METHOD,
)  # fmt: skip
model, tokenizer = load(o.model)
pairs = [pair.split("|") for pair in o.pairs.split(";")]
tokenizer.padding_side = "left"  # the texts end in the same column, and tokens are added after it
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
texts = tokenizer([text for text, _ in pairs], return_tensors="pt", padding=True).to(model.device)
tails = [tokenizer(tail, add_special_tokens=False).input_ids for _, tail in pairs]
steps = max(map(len, tails))
length = max(texts.input_ids.shape[1] + steps, 512)

with torchsparsekv.patch(model, o.method, max_length=length, budget=o.budget) as handle, torch.inference_mode():
    cache = handle.make_cache(len(pairs))
    place = (texts.attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(**texts, position_ids=place, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    totals, place = torch.zeros(len(pairs)), place[:, -1:]
    for t in range(steps):
        chances = logits.float().log_softmax(-1)
        for i, tail in enumerate(tails):
            totals[i] += float(chances[i, tail[t]]) if t < len(tail) else 0.0
        token = torch.tensor([[tail[min(t, len(tail) - 1)]] for tail in tails], device=model.device)
        place = place + 1
        logits = model(token, position_ids=place, past_key_values=cache).logits[:, -1]
    for (text, tail), total, ids in zip(pairs, totals, tails):
        print(f"{total / len(ids):8.3f} nats a token   {text[-30:]!r} -> {tail!r}")
    print(handle.report())
