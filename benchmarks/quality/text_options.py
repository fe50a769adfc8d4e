"""The options of `eval-text`, and the checks that need no model."""
from dataclasses import dataclass
from pathlib import Path

from torchsparsekv_benchmarks._options import at_least, different, option
from torchsparsekv_benchmarks.quality import real_model
from torchsparsekv_benchmarks.quality.options import METHODS, RECALL, Compared, check_compared


@dataclass(frozen=True)
class Options(Compared):
    model: str = option(
        "smollm2", "smollm2, qwen-0.5b or qwen-1.5b (`make real-model`), a Hugging Face path or name, or a .gguf file."
    )
    texts: tuple[str, ...] = option(
        ("moby-dick",), "Files of plain text, comma-separated; or moby-dick and sympy (`make real-model`)."
    )
    lengths: tuple[int, ...] = option((8192,), "Tokens of prompt and scored steps together, comma-separated.")
    steps: int = option(200, "Last tokens of a sample, which are decoded one by one and scored.")
    methods: tuple[str, ...] = option(
        ("full", *METHODS), "Methods, comma-separated. full leaves nothing out: its KL is the noise of the data type."
    )
    budgets: tuple[int, ...] = option((64, 256, 1024), "Tokens retrieved per kv head and step, comma-separated.")
    samples: int = option(8, "Stretches of each text, one after the other, the same for all methods.")
    probe: int = option(
        8, "Samples that also measure mass (the share of the attention weight that a step attends to) and error (of "
        "the attention output)."
    )
    batch: int = option(8, "Samples that are decoded together. Counts of blocks and tokens are means over them.")


def check(o: Options) -> None:
    at_least(o, steps=1)
    check_compared(o)
    different(o, "texts")
    if o.model == RECALL:
        raise ValueError("the recall model reads no texts: name a language model, as with --model smollm2")
    short = [n for n in o.lengths if n < o.steps + 2]
    if short:
        raise ValueError(f"lengths must leave 2 tokens for the prompt beside {o.steps} steps, got {short[0]}")
    names = [name_of(t) for t in o.texts]
    if len(set(names)) < len(names):
        raise ValueError(f"texts are told apart by their file names, which must be different: {', '.join(o.texts)}")
    for text in o.texts:
        check_text(text)


def check_text(text: str) -> None:
    if not path_of(text).is_file():
        fetch = "run `make real-model`, or name other files" if text in real_model.TEXTS else "name a file of text"
        raise ValueError(f"there is no text {path_of(text)}: {fetch}")


def path_of(text: str) -> Path:
    return real_model.FOLDER / real_model.TEXTS[text] if text in real_model.TEXTS else Path(text)


def name_of(text: str) -> str:
    return path_of(text).stem
