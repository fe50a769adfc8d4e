"""The recall model as Hugging Face files: its architecture, its tokenizer, and how to load its weights."""
from pathlib import Path

import torch

from torchsparsekv_benchmarks.recall_model import vocabulary

WEIGHTS = Path(__file__).parent / "weights"
LONGEST = 131072

# 7.2M parameters. Of a head's 32 rotary pairs, the 10 slowest turn less than half a radian in 32K tokens: enough to
# match content at any distance, and the fast ones tell the last few tokens apart.
CONFIG = dict(
    model_type="qwen3", vocab_size=vocabulary.SIZE, hidden_size=320, intermediate_size=768, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=LONGEST,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7}, tie_word_embeddings=True,
    pad_token_id=vocabulary.PAD, bos_token_id=vocabulary.BOS, eos_token_id=None,
)  # fmt: skip


def build(**overrides):
    """A model with random weights, by the global seed."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config(**overrides))


def config(**overrides):
    from transformers import AutoConfig

    fields = {**CONFIG, **overrides}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def tokenizer():
    """One token a word, words parted by spaces. It adds no <bos>: samples begin with one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(vocabulary.names())}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def load(folder: Path = WEIGHTS, *, device="cpu", dtype: torch.dtype = torch.bfloat16):
    """(model, tokenizer) of a trained folder, by default the shipped one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (Path(folder) / "model.safetensors").is_file():
        raise FileNotFoundError(f"no model.safetensors in {folder}; train one with benchmarks/recall_model/train.py")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)
