"""A tokenizer of bytes."""
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def bytes_tokenizer(*, bos: bool = True, chat: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, offline."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {x: i for i, x in enumerate(["<s>", *letters])}
    t = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    if bos:
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", chat_template=chat)
