"""The ways to call generate() of stock transformers."""
import torch
from models import MAX_LENGTH, prompts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import CompileConfig, PreTrainedTokenizerFast

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(3, 41)
GREEDY = dict(max_new_tokens=16, do_sample=False)
LONGER = dict(max_new_tokens=40, do_sample=False)  # so that pages are retrieved after a prompt of nothing


def seeded(model, **options):
    torch.manual_seed(3)
    return model.generate(do_sample=True, top_k=20, max_new_tokens=16, **options)


class Streamer:
    """What TextStreamer is to generate()."""

    def __init__(self):
        self.seen = []

    def put(self, ids):
        self.seen.append(ids.flatten().tolist())

    def end(self):
        self.seen.append("end")


def padded(model, **options):
    return model.generate(input_ids=IDS, attention_mask=MASK, **options)


def streamed(model, **options):
    streamer = Streamer()
    out = model.generate(input_ids=IDS[2:], attention_mask=MASK[2:], streamer=streamer, **GREEDY, **options)
    assert streamer.seen[-1] == "end"
    assert [t for some in streamer.seen[:-1] for t in some] == out.flatten().tolist()
    return streamer.seen


def embedded(model, **options):
    return model.generate(inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK, **GREEDY, **options)


def two_turns(model, **options):
    """A second call with the cache of the first, and another generation in between that must not disturb it."""
    first = model.generate(input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, **GREEDY, **options)
    model.generate(input_ids=IDS + 1, attention_mask=MASK, **GREEDY, **options)
    said, _ = prompts(3, 7, seed=5, ragged=False)
    ids = torch.cat([first.sequences, said], 1)
    mask = torch.cat([MASK, torch.ones_like(ids[:, MASK.shape[1] :])], 1)
    cache = first.past_key_values
    return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **GREEDY, **options)


def scores(model, **options):
    out = model.generate(
        input_ids=IDS, attention_mask=MASK, return_dict_in_generate=True, output_scores=True, **GREEDY, **options
    )
    return out.sequences


def in_inference_mode(model, **options):
    with torch.inference_mode():
        return model.generate(input_ids=IDS, attention_mask=MASK, **GREEDY, **options)


WAYS = {
    "greedy, padded batch": lambda m, **o: m.generate(input_ids=IDS, attention_mask=MASK, **GREEDY, **o),
    "one row, no mask": lambda m, **o: m.generate(input_ids=IDS[2:], **GREEDY, **o),
    "sampling": lambda m, **o: seeded(m, input_ids=IDS, attention_mask=MASK, **o),
    "num_return_sequences": lambda m, **o: seeded(m, input_ids=IDS, attention_mask=MASK, num_return_sequences=2, **o),
    "streamer": streamed,
    "eos": lambda m, **o: padded(m, eos_token_id=list(range(3, 12)), **GREEDY, **o),
    "prompt of one token": lambda m, **o: m.generate(input_ids=IDS[:, -1:], attention_mask=MASK[:, -1:], **LONGER, **o),
    "prompt of two tokens": lambda m, **o: m.generate(IDS[:, -2:], attention_mask=MASK[:, -2:], **LONGER, **o),
    "prompt in chunks": lambda m, **o: padded(m, prefill_chunk_size=16, **GREEDY, **o),
    "inputs_embeds": embedded,
    "two turns": two_turns,
    "scores": scores,
    "inference mode": in_inference_mode,
    "repetition penalty": lambda m, **o: padded(m, repetition_penalty=1.5, **GREEDY, **o),
}  # fmt: skip


def auto_compiled() -> dict:
    """generate() compiles the decode step by itself on a GPU; this makes it do so anywhere, and fail on a break."""
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def tokenizer():
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 97)}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left"
    )
