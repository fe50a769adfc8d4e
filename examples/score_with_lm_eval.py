"""Score a patched and an unpatched model with lm-eval. The script makes the task, so nothing is downloaded.

    pip install "torchsparsekv[eval]"
    python examples/score_with_lm_eval.py --model MODEL --methods quest,streaming

A prompt hides records of a key and four values among other words, and asks for the values of one key. Tasks that only
score likelihoods show no loss, because they read whole texts, and prompts are attended to exactly.
"""
import random

from common import load, options
from datasets import Dataset
from datasets.table import InMemoryTable
from lm_eval import evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

import torchsparsekv

o = options(__doc__.splitlines()[0], methods="quest,pariskv,streaming", words=600, records=20, samples=8, budget=64)


def sample(index: int) -> tuple[str, str]:
    draw = random.Random(index)
    keys = [f"k{i:03d} k{draw.randrange(256):03d}" for i in draw.sample(range(256), o.records)]
    values = [" ".join(f"v{draw.randrange(256):03d}" for _ in range(4)) for _ in keys]
    words = [f"w{draw.randrange(480):03d}" for _ in range(o.words)]
    for at, key, value in zip(sorted(draw.sample(range(o.words), o.records), reverse=True), keys, values):
        words.insert(at, f"{key} {value} .")
    asked = draw.randrange(o.records)
    return f"{' '.join(words)} ask {keys[asked]}", values[asked]


def dataset(**_) -> dict:
    prompts, answers = zip(*map(sample, range(o.samples)))
    columns = {"prompt": list(prompts), "answer": list(answers)}
    return {"test": Dataset(InMemoryTable.from_pydict(columns), fingerprint="records")}


TASK = {
    "task": "records", "custom_dataset": dataset, "test_split": "test", "output_type": "generate_until",
    "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "do_sample": False},
    "filter_list": [{"name": "values", "filter": [{"function": "regex", "regex_pattern": r"(v\d+ v\d+ v\d+ v\d+)"}]}],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
model, tokenizer = load(o.model)


def score() -> float:
    tasks, lm = {"records": ConfigurableTask(config=TASK)}, HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    return evaluate(lm, tasks, bootstrap_iters=0)["results"]["records"]["exact_match,values"]


print(f"{'unpatched':<12} {score():.3f}")
for method in o.methods.split(","):
    with torchsparsekv.patch(model, method, budget=o.budget, sink=32, window=64) as handle:
        print(f"{method:<12} {score():.3f}   density {handle.report().layers[-1].density:.3f}")
