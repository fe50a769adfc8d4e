"""Compare methods on your model, your text and your budget: how much of the attention does each method keep?

    python examples/compare_methods.py --model MODEL --document FILE --methods quest,pariskv,clusterkv --budget 256

Every method decodes the tokens that the dense model generated. The columns:

same:  how many of these tokens the method would have generated too.
read:  tokens that a step attended to. Methods differ in this at the same budget.
kept:  the share of the attention weight that the attended tokens have.
worst: `kept` of the worst head.
error: the relative error of the attention outputs of heads.

`--define FILE` runs a file that defines a method of your own.
"""
import runpy

import torch
from common import document, load, options

import torchsparsekv
from torchsparsekv.probe import probe

o = options(
    __doc__.splitlines()[0], document="", words=2000, new_tokens=16, budget=64,
    methods="streaming,quest,arkvale,clusterkv,louiskv,pariskv,oracle", define="",
)  # fmt: skip
if o.define:
    runpy.run_path(o.define)
model, tokenizer = load(o.model)
ids = tokenizer(document(o.document, o.words), return_tensors="pt").input_ids.to(model.device)
length = ids.shape[1] + o.new_tokens
dense = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=o.new_tokens, do_sample=False)
said = dense[0, ids.shape[1] :].tolist()

print(f"{ids.shape[1]} tokens, budget {o.budget}")
print(f"{'method':<12} {'same':>7} {'read':>7} {'kept':>7} {'worst':>7} {'error':>7}")
for method in o.methods.split(","):
    with torchsparsekv.patch(model, method, max_length=length, budget=o.budget) as handle, torch.inference_mode():
        cache = handle.make_cache()
        logits, same = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1], 0
        with probe(cache) as seen:
            for token in said:
                same += int(logits.argmax(-1)) == token
                logits = model(torch.tensor([[token]], device=model.device), past_key_values=cache).logits[:, -1]
        sparse = seen.sparse()
        kept, error = seen.mass()[sparse], seen.error()[sparse]
        worst = kept.mean((1, 2)).min()
        read = [r.attended_per_step for r in handle.report().layers if r.method == method]
    shares = f"{kept.mean():>7.3f} {worst:>7.3f} {error.mean():>7.3f}"
    print(f"{method:<12} {same:>3}/{len(said):<3} {sum(read) / len(read):>7.0f} {shares}")
