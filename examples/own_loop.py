"""A loop of your own: the prompt in chunks, then compiled decode steps with sampling.

    python examples/own_loop.py --model MODEL --document FILE --chunk 8192

No chunk may have one token, because a forward of one token is a decode step.
"""
import torch
from common import METHOD, document, load, options

import torchsparsekv

o = options(
    __doc__.splitlines()[0], document="", words=2000, chunk=512, new_tokens=24, budget=128, compiled=True,
    method=METHOD,
)  # fmt: skip
if o.chunk < 2:
    raise SystemExit(f"--chunk must be at least 2, got {o.chunk}: one token would be taken for a decode step")
model, tokenizer = load(o.model)
ids = tokenizer(document(o.document, o.words), return_tensors="pt").input_ids.to(model.device)

with torchsparsekv.patch(model, o.method, budget=o.budget) as handle, torch.inference_mode():
    cache = handle.make_cache(1, ids.shape[1] + o.new_tokens)
    cuts = list(range(0, ids.shape[1], o.chunk))
    if ids.shape[1] - cuts[-1] == 1 and len(cuts) > 1:
        cuts.pop()
    for begin, end in zip(cuts, [*cuts[1:], ids.shape[1]]):
        logits = model(ids[:, begin:end], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    step = torch.compile(model.forward, fullgraph=True, mode=mode) if o.compiled else model.forward
    said = []
    for _ in range(o.new_tokens):
        token = torch.multinomial((logits.float() / 0.8).softmax(-1), 1)
        said.append(int(token))
        logits = step(token, past_key_values=cache).logits[:, -1].clone()
    print(tokenizer.decode(said))
    print(handle.report())
