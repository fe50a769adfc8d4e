"""One rank of a vLLM with tensor parallelism: `torchrun vllm_ranks.py MODEL OPTIONS [MODULE ...]`; see test_vllm.py.

Every rank has an engine of its own, which plans for itself and must come to what the others come to. Rank 0 prints, by
name of the options, what each of them found. The modules are imported first: what the tests' process was told to load
is there in its ranks too.
"""
import importlib.util
import itertools
import json
import os
import sys

import torch.distributed as dist

PLANNED = 24  # blocks where host memory is scarce
BLOCK = 2 * 16 * 2 * 64 * 4  # bytes of one in a rank: 2 layers, 16 tokens, keys and values of one head, float32
RANK = int(os.environ.get("RANK", "0"))


def scarce():
    """Free host memory as one rank after another sees it: for the first it is just enough, and less at every look."""
    enough = round((PLANNED + 0.5) * BLOCK * 2 / 0.8)
    left = (enough + 40 * RANK * BLOCK - looks * BLOCK for looks in itertools.count())
    return lambda: next(left)


def new_store(name: str, agent: dist.TCPStore) -> None:
    """An engine ends its process group, and torchrun's store keeps what that said: the next is to have its own."""
    from vllm.utils.network_utils import get_open_port

    if RANK == 0:
        agent.set(name, str(get_open_port()))
    os.environ |= {"MASTER_PORT": agent.get(name).decode(), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def found(path: str, options: dict) -> list[dict]:
    from vllm.distributed.parallel_state import get_world_group
    from vllm_serving import counter, ragged, serving, tokens_of

    from torchsparsekv.engines import vllm as engine

    engine.host.available = scarce()
    with serving(path, tensor_parallel_size=2, distributed_executor_backend="external_launcher", **options) as llm:
        ours = engine.ours_in(llm.llm_engine.vllm_config)
        here = {
            "tokens": tokens_of(llm, ragged())[0],
            "heads": [impl.num_kv_heads for impl in ours],
            "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
            "preempted": counter(llm, "vllm:num_preemptions"),
        }
        ranks: list = [None, None]
        dist.all_gather_object(ranks, here, group=get_world_group().cpu_group)
    return ranks


if __name__ == "__main__":
    path, options, *first = sys.argv[1:]
    for module in first:
        if importlib.util.find_spec(module.partition(".")[0]):  # pytest knows some by other names
            importlib.import_module(module)
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    all_found = {}
    for name, given in json.loads(options).items():
        new_store(name, agent)
        all_found[name] = found(path, given)
    if RANK == 0:
        print("FOUND", json.dumps(all_found))
