"""Ten thousand generated tokens with every method: what grows meanwhile, recompiles, or is not in the CUDA graph.

    make long > long.log
    python tests/tools/long_run.py [--tokens 10000] [--methods quest,prkv] [--device cuda] [--step captured]

A small model through stock `generate()`, in three calls on one cache: a tenth of the tokens, in two calls, compiles and
settles (what capturing a graph frees, cuBLAS's workspace, the next call takes again), the rest is watched. Exits with 1
if a method grows by more than 512 bytes on the device or by ALLOWED_MIB in the process, if it recompiles, or leaves the
graph.
"""
import argparse
import json
import sys
import time
from pathlib import Path
from typing import get_args

import torch
from torch._dynamo.utils import counters

import torchsparsekv
from torchsparsekv.method import Step

PROMPT = 1500
ALLOWED_MIB = 64  # of the process: Python's own lists and caches; a leak of 8 KB a step would be more
WATCHED = ("graphs", "skips", "device_bytes")


def model_of(device: torch.device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1 << 16, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.float32 if device.type == "cpu" else torch.bfloat16).eval()


def resident_mib() -> float:
    """Of this process, pinned memory included."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def seen(*ids: torch.Tensor) -> dict[str, float]:
    """What must stay as it is. The tokens grow: `ids` are those of the answer, and those that the cache remembers."""
    stats, inductor = counters["stats"], counters["inductor"]
    held = torch.cuda.memory_allocated() - sum(x.nbytes for x in ids) if ids[0].is_cuda else 0
    skips = inductor["cudagraph_skips"] + inductor["cudagraph_partitions"]
    # memory is handed out in pieces of 512 bytes
    return {"graphs": stats["unique_graphs"], "skips": skips, "device_bytes": held // 512 * 512, "MiB": resident_mib()}


def run(name: str, tokens: int, device: torch.device, step: Step = "compiled") -> dict:
    """Of one method: what changed while nine tenths of the tokens were generated."""
    torch._dynamo.reset()
    counters.clear()
    model, begin = model_of(device), time.perf_counter()
    ids = torch.randint(1, 512, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(device)
    told = {"max_length": PROMPT + tokens, "budget": 256, "sink": 32, "window": 128, "skip_layers": 1}
    with torchsparsekv.patch(model, name, step=step, **told) as handle:
        cache, rows = handle.make_cache(1), []
        for new in (tokens // 20, tokens // 20, tokens - tokens // 20 * 2):
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=new, do_sample=False)
            rows.append(seen(ids, cache.ids))
        report = handle.report()
        steps = max(r.steps for r in report.layers)
    grown = {k: rows[2][k] - rows[1][k] for k in rows[0]}
    made, took = ids.shape[1] - PROMPT, time.perf_counter() - begin
    return {"method": name, "tokens": made, "steps": steps, "seconds": took, **grown}


def good(row: dict) -> bool:
    return not any(row[k] for k in WATCHED[:2]) and row["device_bytes"] <= 512 and row["MiB"] < ALLOWED_MIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--methods", default=",".join(torchsparsekv.methods()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--step", default="compiled", choices=get_args(Step), help="what generate() makes of a step")
    o = parser.parse_args()
    rows = []
    for name in o.methods.split(","):
        rows.append(run(name, o.tokens, torch.device(o.device), o.step))
        print(json.dumps({k: round(v, 1) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
    wrong = ", ".join(r["method"] for r in rows if not good(r))
    print(f"{len(rows)} methods, {o.tokens} tokens each: {wrong or 'nothing'} grew")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
