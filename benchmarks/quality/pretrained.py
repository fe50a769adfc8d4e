"""Load a language model and its tokenizer from a name, a folder or a GGUF file. An error has one line."""
import contextlib
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchsparsekv_benchmarks.quality import real_model

GGUF = ".gguf"
NO_TOKENIZER = "has no tokenizer for text: put the tokenizer of the model beside it"


def check_name(name: str) -> None:
    """Refuses what can be told from the name alone, before anything is loaded."""
    path = located(name)
    if name in real_model.MODELS and not path.exists():
        raise ValueError(f"{name} is not in {path.parent}: run `make real-model`, or name another model")
    if path.suffix == GGUF and not path.is_file():
        raise ValueError(f"there is no file {name}")
    if not path.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"there is no model at {name}")
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(p.name for p in path.glob(f"*{GGUF}"))
        hint = f"; name the file in it: {path / files[0]}" if files else ""
        raise ValueError(f"{name} is a folder without a config.json, so it holds no Hugging Face model{hint}")


class Files(NamedTuple):
    """A model whose weights are not loaded."""

    name: str
    tokenizer: Any
    config: Any
    where: str
    how: dict[str, str]

    def empty(self, dtype: Any) -> Any:
        """The model without weights, for checks."""
        return empty(self.config, dtype)

    def load(self, device: torch.device, dtype: Any) -> Any:
        """The model in eval mode. A file that `make real-model` fetched is first converted, once."""
        from transformers import AutoModelForCausalLM

        where, how, path = self.where, self.how, located(self.name)
        if how and self.name in real_model.MODELS:
            where, how = str(convert(path, path.parent / self.name)), {}
        with one_line(self.name):
            model = AutoModelForCausalLM.from_pretrained(where, config=self.config, dtype=dtype, **how)
        return model.to(device).eval()


def empty(config: Any, dtype: Any) -> Any:
    """A model of this config without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if dtype == "auto" else dtype).eval()


def opened(name: str, yarn: float = 1.0) -> Files:
    """The tokenizer and the config, with `yarn` times the model's own positions."""
    check_name(name)
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as e:
        raise RuntimeError("a language model needs transformers: pip install 'torchsparsekv[hf]'") from e
    path = located(name)
    if path.suffix == GGUF and find_spec("gguf") is None:
        raise RuntimeError(f"{name} is a {GGUF} file, which needs a package: pip install gguf")
    local = path.suffix == GGUF or name in real_model.MODELS
    how = {"gguf_file": path.name} if path.suffix == GGUF else {}
    where = str(path.parent if how else path) if local else name
    with one_line(name):
        tokenizer = tokenizer_of(AutoTokenizer, where, name, **how)
        config = AutoConfig.from_pretrained(where, **how)
    if yarn > 1:
        widen(config, yarn, name)
    return Files(name, tokenizer, config, where, how)


@contextlib.contextmanager
def one_line(name: str) -> Iterator[None]:
    """Say in one line what transformers finds wrong with a model."""
    try:
        yield
    except ImportError as e:
        raise RuntimeError(f"{name} needs a package that is not installed: {first_line(e)}") from e
    except OSError as e:
        raise ValueError(
            f"{name} is not a folder with a model, nor a {GGUF} file, and the Hugging Face hub gave no model of this "
            f"name: {first_line(e)}"
        ) from e


def pretrained(name: str, device: torch.device, dtype: Any, yarn: float = 1.0) -> tuple[Any, Any]:
    """(tokenizer, model in eval mode), with `yarn` times the model's own positions."""
    files = opened(name, yarn)
    return files.tokenizer, files.load(device, dtype)


def convert(file: Path, folder: Path) -> Path:
    """The model of a GGUF file in bfloat16, as a folder that loads in seconds. Reading the file takes a minute."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    how: Any = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **how)
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights that are written are not quantised
    config.dtype = torch.bfloat16
    with tempfile.TemporaryDirectory(dir=file.parent) as outer:
        made = Path(outer) / "model"
        AutoTokenizer.from_pretrained(file.parent, **how).save_pretrained(made)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        weights = {k: x.contiguous().to(torch.bfloat16) for k, x in model.state_dict().items() if k not in tied}
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        model.generation_config.save_pretrained(made)
        config.save_pretrained(made)
        made.rename(folder)
    return folder


def widen(config: Any, factor: float, name: str) -> None:
    """`factor` times the positions, by YaRN over the model's plain RoPE."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError(f"yarn={factor:g} needs a model with plain RoPE, {name} has {rope}: leave yarn at 1")
    own = config.max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": own}
    config.rope_parameters = {**rope, **yarn}
    config.max_position_embeddings = int(own * factor)


def located(name: str) -> Path:
    """Where a model is; for a name of the hub no file. Of a model that `make real-model` fetched it is the folder that
    `convert` made of its file, if there is one."""
    if name not in real_model.MODELS:
        return Path(name)
    folder = real_model.FOLDER / name
    return folder if (folder / "config.json").is_file() else real_model.FOLDER / real_model.MODELS[name]


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
