"""A model with a LoRA adapter of PEFT: one patch works with the adapter and without it.

    pip install "torchsparsekv[peft]"
    python examples/adapter.py --model MODEL --adapter FOLDER --document FILE

Without --adapter the adapter has random weights, so that its answer differs from the model's own.
"""
import contextlib

import torch
from common import METHOD, document, load, options
from peft import LoraConfig, PeftModel, get_peft_model

import torchsparsekv

o = options(__doc__.splitlines()[0], adapter="", document="", words=600, new_tokens=8, budget=64, method=METHOD)
model, tokenizer = load(o.model)
ids = tokenizer(document(o.document, o.words), return_tensors="pt").input_ids.to(model.device)
if o.adapter:
    adapted = PeftModel.from_pretrained(model, o.adapter).eval()
else:
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()


def answer() -> str:
    out = adapted.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=o.new_tokens, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


ways = {"with the adapter": contextlib.nullcontext, "without it": adapted.disable_adapter}
for name, way in ways.items():
    with way():
        print(f"{name + ', unpatched':<28} {answer()}")
with torchsparsekv.patch(adapted, o.method, budget=o.budget, sink=32, window=64) as handle:
    for name, way in ways.items():
        with way():
            print(f"{name + ', ' + o.method:<28} {answer()}")
    print(handle.report())
