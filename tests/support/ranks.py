"""One rank of a tensor parallel run: `torchrun ranks.py FOLDER`, a folder of saved models; see test_tensor_parallel.py.

Rank 0 prints, per model, the kv heads that it has in a layer and how far its logits are from those of a single process.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from models import greedy_logits, prompts
from transformers import AutoModelForCausalLM

import torchsparsekv

PATCH = dict(max_length=128, budget=8, sink=8, window=6, skip_layers=1)
# The methods of which each rank decides as one process would: by what a kv head has, or its group of query heads.
LOUIS = dict(per_head=True, cluster_size=4, stretch=16, segment_min=2, segment_max=4)
METHODS = {"quest": dict(block_size=4), "louiskv": LOUIS}


def compare(path: Path) -> dict:
    """The worst of the methods."""
    found = {"heads": 0, "error": 0.0}
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
        for options in ({}, {"tp_plan": "auto"})
    ]
    for method, own in METHODS.items():
        logits = []
        for model in models:
            with torchsparsekv.patch(model, method, **PATCH, **own) as handle:
                cache = handle.make_cache(3)
                logits.append(greedy_logits(model, *prompts(3, 61), 20, cache))
                found["heads"] = cache.layers[1].state.store.pool.shape[1]
        found["error"] = max(found["error"], float((logits[0] - logits[1]).abs().max()))
    return found


def torchrun(script: str, *arguments: str, gpus: bool = False) -> dict:
    """What rank 0 of two found, by a script in this folder. gpus: the GPUs that there are may be used."""
    here = Path(__file__).parent
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(here / script)]
    path = os.pathsep.join([str(here), str(here.parent / "engines"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    run = [sys.executable, *launch, *arguments]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr  # all of it: which rank went first is not told at the end
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


if __name__ == "__main__":
    found = {}
    for path in sorted(Path(sys.argv[1]).iterdir()):
        try:
            found[path.name] = compare(path)
        except NotImplementedError as e:
            found[path.name] = {"refused": str(e)}
    if torch.distributed.get_rank() == 0:
        print("FOUND", json.dumps(found))
    torch.distributed.destroy_process_group()
