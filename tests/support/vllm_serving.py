"""An engine of vLLM with this package as its attention backend, and prompts of many lengths."""
import importlib.util
from pathlib import Path

import torch


def _native() -> bool:
    """Whether this vLLM has its native code, which needs a GPU; a stand-in for it is a Python file."""
    if not (GPU and importlib.util.find_spec("vllm")):
        return False
    found = importlib.util.find_spec("vllm._C_stable_libtorch")
    return bool(found and found.origin and found.origin.endswith(".so"))


GPU = torch.cuda.is_available()
NATIVE = _native()
NEW = 24
GRAPHS = (1, 2, 4, 8, 16)  # requests
SIZES = dict(
    vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip


def tiny_llama(folder: Path, **sizes):
    """Save a llama with random weights, whose greedy tokens are far from a tie, and return it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).float().eval()
    for name, p in model.named_parameters():
        if "norm" not in name:
            p.data.normal_(0, 0.08)
    model.lm_head.weight.data.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model


def serving(path: str, backend: str = "", graphs: bool = False, **options):
    """Without a backend: with ours."""
    from torchsparsekv.engines._vllm_seams import seam
    from torchsparsekv_benchmarks.speed import serve

    usual = dict(
        graphs=GRAPHS if graphs else (), dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
        block_size=16, disable_log_stats=False, disable_custom_all_reduce=True, kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True, native=NATIVE, **({"gpu_memory_utilization": 0.05} if GPU else {}),
    )  # fmt: skip
    return serve.engine(path, backend or seam().NAME, **(usual | options))


def tokens_of(llm, prompts: list[list[int]], new: int = NEW, logprobs: int | None = None):
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    done = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    return [list(x.outputs[0].token_ids) for x in done], done


def counter(llm, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def ragged() -> list[list[int]]:
    """Prompts of many lengths; some begin alike, some are longer than a chunk."""
    token = lambda i, seed: (i * (2 * seed + 3) + 7 * seed) % 120 + 3  # noqa: E731
    lengths = [1, 7, 15, 16, 17, 40, 100, 33, 64, 150, 48, 90]
    alike = [token(i, 40) for i in range(70)]
    return [[token(i, s) for i in range(n)] for s, n in enumerate(lengths)] + [
        alike + [token(i, s) for i in range(n)] for s, n in enumerate((5, 20, 61))
    ]
