"""A conversation: chat template, streamer, a second turn, a regenerated answer, and an edited message.

    python examples/conversation.py --model MODEL --messages "What is a cache?|And a page?" --edited "Who wrote it?"

The cache keeps the conversation, and each turn reads only its new tokens. A template may turn the same messages into
other tokens than the generated ones. So each turn crops the cache to the tokens that cache and new prompt share.
"""
import torch
from common import document, load, options
from transformers import TextStreamer

import torchsparsekv

PLAIN = "{% for m in messages %}{{ m['content'] }} {% endfor %}"  # for a tokenizer without a chat template

o = options(
    __doc__.splitlines()[0], messages="w001 w002|w003 w004", edited="w005 w006", words=600, new_tokens=8, budget=128,
    method="quest",
)  # fmt: skip
model, tokenizer = load(o.model)
tokenizer.chat_template = tokenizer.chat_template or PLAIN
streamer = TextStreamer(tokenizer, skip_prompt=True)
messages = [{"role": "user", "content": document("", o.words)}]


def answer(messages: list[dict], cached: torch.Tensor) -> torch.Tensor:
    """Stream the answer and add it to the messages. `cached`: the token ids in the cache. Returns the new token ids."""
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids, held = given.input_ids.to(model.device), int(cache.get_seq_length())
    common = min(held, ids.shape[1] - 2)  # one new token alone would count as a decode step
    differ = (ids[0, :common] != cached[0, :common]).nonzero()
    keep = int(differ[0]) if len(differ) else common
    cache.crop(keep)
    print(f"> {messages[-1]['content'][:20]}   ({keep} tokens of {held} stay, {ids.shape[1] - keep} are new)")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=o.new_tokens, do_sample=False,
        streamer=streamer,
    )  # fmt: skip
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": text})
    return out


with torchsparsekv.patch(model, o.method, budget=o.budget, max_length=min(4096, 4 * o.words)) as handle:
    cache = handle.make_cache()
    ids = torch.empty(1, 0, dtype=torch.long, device=model.device)
    for said in o.messages.split("|"):
        messages.append({"role": "user", "content": said})
        ids = answer(messages, ids)
    first = messages.pop()["content"]
    ids = answer(messages, ids)
    print(f"the same answer again: {messages[-1]['content'] == first}")
    messages[-2:] = [{"role": "user", "content": o.edited}]
    answer(messages, ids)
    print(handle.report())
