"""Two tensor parallel ranks on a CPU answer as one process, and each stores its own kv heads only."""
from models import tiny
from ranks import torchrun

HEADS = {"llama": 1, "olmo2": 2, "phi3": 2}  # of two: shared, or on every rank, where a norm or a slice needs all


def test_two_ranks_answer_as_one(tmp_path):
    for family in (*HEADS, "gpt_oss"):
        tiny(family, vocab_size=98).cpu().save_pretrained(tmp_path / family)  # 5.17 wants it shared alike
    found = torchrun("ranks.py", str(tmp_path))
    assert {name: found[name]["heads"] for name in HEADS} == HEADS
    assert max(found[name]["error"] for name in HEADS) <= 1e-5
    assert "does not say how kv heads are shared by 2 ranks" in found["gpt_oss"]["refused"]
