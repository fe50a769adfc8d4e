"""lm-eval drives a patched model as it drives any other: a task of our own, so that nothing is downloaded."""
import pytest
import torch
from chain import VOCABULARY, chain_model
from models import tiny
from standin import LENGTH, STEPS, sample
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import torchsparsekv

lm_eval = pytest.importorskip("lm_eval")

SMALL = dict(sink=16, window=16, budget=32, skip_layers=1, block_size=4)


def words() -> PreTrainedTokenizerFast:
    """Token 7 is written t7."""
    t = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token="t0", eos_token="t0")


def written(ids) -> str:
    return " ".join(f"t{i}" for i in ids)


def chains(**_) -> dict:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    samples = [sample("chain", LENGTH, index) for index in range(6)]
    docs = {"text": [written(s.prompt) for s in samples], "target": [written(s.answers) for s in samples]}
    # With a fingerprint of our own: some versions of dill cannot pickle what pyarrow's tables hold to make one.
    return {"test": Dataset(InMemoryTable.from_pydict(docs), fingerprint="chains")}


def task():
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={
            "task": "chains", "custom_dataset": chains, "test_split": "test", "output_type": "generate_until",
            "doc_to_text": "{{text}}", "doc_to_target": "{{target}}", "target_delimiter": "",
            "generation_kwargs": {"until": [], "max_gen_toks": STEPS, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    )  # fmt: skip


def accuracy(model, batch_size: int) -> float:
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=words(), batch_size=batch_size, max_length=1024)
    return lm_eval.evaluate(lm, {"chains": task()}, bootstrap_iters=0)["results"]["chains"]["exact_match,none"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_patched_model_answers_as_its_method_retrieves(batch_size):
    model = chain_model(1024)
    assert accuracy(model, batch_size) == 1
    for method, right in (("quest", True), ("streaming", False)):
        with torchsparsekv.patch(model, method, **SMALL) as handle:
            assert (accuracy(model, batch_size) == 1) == right
            report = handle.report()
        assert not report.warnings
        assert report.layers[-1].steps == STEPS - 1
        assert report.layers[-1].density < 0.35


def test_likelihoods_are_exact_whatever_the_method():
    """They are read off whole texts, which are attended to exactly."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = tiny(vocab_size=VOCABULARY)
    ask = [Instance("loglikelihood", {}, (written(range(3, 90)), " " + written(range(200, 220))), 0)]
    want = HFLM(pretrained=model, tokenizer=words(), batch_size=1).loglikelihood(ask)
    with torchsparsekv.patch(model, "quest", **SMALL):
        got = HFLM(pretrained=model, tokenizer=words(), batch_size=1).loglikelihood(ask)
    assert got[0][0] == pytest.approx(want[0][0], rel=1e-5)
    assert torch.isfinite(torch.tensor(got[0][0]))
