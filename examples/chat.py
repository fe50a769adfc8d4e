"""Read a long document once, and ask independent questions about it.

    python examples/chat.py --model MODEL --document FILE --questions "Who wrote it?|When?"

The document is a prompt: it is attended to exactly, and its keys and values stay in one cache. Each question uses a
fork of this cache, so the document is not read again, and no question sees another question.
"""
import time

import torch
from common import METHOD, document, load, options

import torchsparsekv

o = options(
    __doc__.splitlines()[0], document="", words=4000, questions="w001 w002|w003 w004", new_tokens=16, budget=128,
    method=METHOD,
)  # fmt: skip
model, tokenizer = load(o.model)
text = tokenizer(document(o.document, o.words), return_tensors="pt").input_ids.to(model.device)
questions = [tokenizer(q, return_tensors="pt", add_special_tokens=False).input_ids for q in o.questions.split("|")]
longest = text.shape[1] + max(q.shape[1] for q in questions) + o.new_tokens

with torchsparsekv.patch(model, o.method, max_length=longest, budget=o.budget) as handle:
    print(handle.plan())
    begin = time.perf_counter()
    read = handle.make_cache()
    with torch.inference_mode():
        model(text, past_key_values=read, logits_to_keep=1)
    print(f"{text.shape[1]} tokens read in {time.perf_counter() - begin:.1f} s")
    for asked in questions:
        begin = time.perf_counter()
        ids = torch.cat([text, asked.to(model.device)], 1)
        cache = handle.fork(read)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=o.new_tokens,
            do_sample=False,
        )  # fmt: skip
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        print(f"> {tokenizer.decode(asked[0])}\n{answer}   ({time.perf_counter() - begin:.1f} s)")
    print(handle.report())
