"""A language model and its tokenizer from a name, a folder or a GGUF file, and in one line what is in the way of it."""
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchsparsekv_benchmarks.quality import real_model

GGUF = ".gguf"
NO_TOKENIZER = "has no tokenizer that makes tokens of a text: put the model's own beside it"


def check_name(name: str) -> None:
    """Refuses what can be told from the name alone, before anything is loaded."""
    path = located(name)
    if name in real_model.MODELS and not path.is_file():
        raise ValueError(f"{name} is not in {path.parent}: run `make real-model`, or name another model")
    if path.suffix == GGUF and not path.is_file():
        raise ValueError(f"there is no file {name}")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no model at {name}")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(p.name for p in path.glob(f"*{GGUF}"))
        hint = f"; name the file in it: {path / files[0]}" if files else ""
        raise ValueError(f"{name} is a folder without a config.json, so it holds no Hugging Face model{hint}")


def pretrained(name: str, device: torch.device, dtype: Any) -> tuple[Any, Any]:
    """(tokenizer, model in eval mode)."""
    check_name(name)
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as e:
        raise RuntimeError("a language model needs transformers: pip install 'torchsparsekv[hf]'") from e
    path = located(name)
    where, how = (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (name, {})
    if how and find_spec("gguf") is None:
        raise RuntimeError(f"{name} is a {GGUF} file, which needs a package: pip install gguf")
    try:
        tokenizer = tokenizer_of(AutoTokenizer, where, name, **how)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **how)
    except ImportError as e:
        raise RuntimeError(f"{name} needs a package that is not installed: {first_line(e)}") from e
    except OSError as e:
        raise ValueError(
            f"{name} is neither a folder with a model, nor a {GGUF} file, nor a name that Hugging Face's hub could be "
            f"asked for: {first_line(e)}"
        ) from e
    return tokenizer, model.to(device).eval()


def located(name: str) -> Path:
    """Where a model is; for a name of the hub no file."""
    return real_model.FOLDER / real_model.MODELS[name] if name in real_model.MODELS else Path(name)


def tokenizer_of(auto: Any, where: str, name: str, **how: str) -> Any:
    """transformers says in many words that there is none, or of some kinds of models makes an empty one."""
    try:
        tokenizer = auto.from_pretrained(where, **how)
        told = tokenizer("A text.", add_special_tokens=False)["input_ids"]
    except (ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"{name} {NO_TOKENIZER} ({first_line(e)})") from e
    if not told:
        raise ValueError(f"{name} {NO_TOKENIZER}")
    return tokenizer


def first_line(e: BaseException) -> str:
    return str(e).strip().split("\n", 1)[0]
