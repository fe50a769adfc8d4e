"""Which tests `make test` leaves to `make full`: those in tests/slow.txt, so that it takes less than twelve minutes on
two cores, all that it sets up included.

    python -m pytest -n auto --dist worksteal --durations=0 > log      and then      python tests/slow.py log

lists those that take longer than LIMIT, but for what KEPT names: one or a few of each kind of which all are long.
"""
import re
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
LIMIT = 1.0  # seconds of one core
KEPT = (
    "test_captured.py::test_other_weights",
    "test_cli.py::test_a_command_is_imported_when_it_is_called[methods]",
    "test_clusters.py::test_kernels_and_references_live_alike[clusterkv-more3-triton]",
    "test_families.py::test_decode_is_one_graph[gpt_oss]",
    "test_families.py::test_full_budget_is_dense_and_generates_the_same[gemma3_text]",
    "test_families.py::test_full_budget_is_dense_and_generates_the_same[gpt_oss]",
    "test_families.py::test_full_budget_is_dense_and_generates_the_same[qwen3_moe]",
    "test_generate.py::test_auto_compiled_generate_as_unpatched[prompt of one token]",
    "test_generate.py::test_auto_compiled_generate_is_one_graph[icecache]",
    "test_generate.py::test_auto_compiled_generate_is_one_graph[pariskv]",
    "test_icecache.py",
    "test_icecache_reuse.py",
    "test_imports.py::test_core_works_without[absent0]",
    "test_models.py::test_compiled_decode_is_dense_and_compiles_once[quest-qwen3-4]",
    "test_models.py::test_compiled_prompts_are_dense_and_share_a_graph[quest]",
    "test_models.py::test_each_row_of_a_padded_batch_is_that_prompt_alone",
    "test_ops.py::test_kernel_equals_reference[best_pages",
    "test_ops.py::test_kernel_equals_reference[page_peaks",
    "test_ops.py::test_kernel_equals_reference[sparse_attention",
    "test_ops.py::test_kernel_equals_reference[visit_nodes",
    "test_packaging.py::test_installed_wheel_imports",
    "test_page_peaks.py",
    "test_plant_tree.py",
    "test_results.py::test_the_committed_page",
    "test_sanitize.py",
    "test_store_machine.py",
    "test_use.py::test_a_broken_prompt_cannot_be_gone_on_with[model.layers.2.mlp-memory]",
    "test_use.py::test_a_ragged_prompt_in_chunks[quest-True]",
    "test_visit_nodes.py::test_the_best_of_many",
)


def slow_of(log: str) -> list[str]:
    """By a log of pytest, with the durations of all setups, calls and teardowns."""
    seconds: Counter[str] = Counter()
    for found in re.finditer(r"^ *([\d.]+)s +(?:setup|call|teardown) +(tests/\S+::.*?) *$", log, re.M):
        seconds[found[2]] += float(found[1])
    kept = tuple(f"tests/{name}" for name in KEPT)
    return sorted(name for name, s in seconds.items() if s > LIMIT and not name.startswith(kept))


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in slow_of(Path(sys.argv[1]).read_text())))
