"""Code that the examples share: options, a model to try them on, and a text that is long enough."""
import argparse
import random
from pathlib import Path

import torch

METHOD = "pariskv"
RECALL = "recall"  # the recall model of 7.2M parameters: it knows no language, but recalls words of its prompt


def options(about: str, **defaults) -> argparse.Namespace:
    """The values of the command line: `--model`, and an option for each of `defaults`."""
    parser = argparse.ArgumentParser(description=about)
    for name, default in {"model": RECALL, **defaults}.items():
        kind = int if isinstance(default, bool) else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"[{default}]")
    return parser.parse_args()


def load(name: str):
    """(model, tokenizer) by name or folder, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == RECALL:
        from torchsparsekv_benchmarks.recall_model import model

        net, tokenizer = model.load(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        return net.eval(), tokenizer
    net = AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device).eval()
    return net, AutoTokenizer.from_pretrained(name)


def document(path: str, words: int) -> str:
    """The text of a file. Without a path: random words that the recall model knows."""
    if path:
        return Path(path).read_text()
    if words < 1:
        raise SystemExit(f"--words must be at least 1, got {words}: there would be nothing to answer for")
    return " ".join(f"w{random.Random(i).randrange(480):03d}" for i in range(words))
