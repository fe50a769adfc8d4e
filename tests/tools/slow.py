"""Which tests are slow: `make test` leaves them out, `make slow` runs them, `make full` runs all tests.

Slow are the tests in tests/tools/slow.txt and the tests that need a fixture of FIXTURES. To write the list anew, run

    python -m pytest -n auto --dist worksteal --durations=0 > log
    python tests/tools/slow.py log

The list has every test that takes longer than LIMIT in any of the logs, except for the tests of KEPT: one or a few of
each kind of which all are slow. A log counts a fixture for the first test that needs it; FIXTURES names the slow ones.
A log counts a compiled graph for the first test that compiles it; so remove the caches of torch before the run.
"""
import re
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
LIMIT = 1.0  # seconds of one core
FIXTURES = (
    "benchmarks/test_bench.py::whole",
    "benchmarks/test_report.py::evaluated",
    "commands/test_demo.py::shown",
)
FIRST = (  # of the slow tests: CI stops after thirty minutes
    "benchmarks/test_parallel.py",
    "ops/_machinery/test_kernel_compilation.py",
    "patches/test_families.py::test_decode_is_one_graph",
    "patches/test_models.py::test_compiled_prompts_are_dense_and_share_a_graph",
    "patches/test_tensor_parallel.py",
)
KEPT = (
    "commands/test_cli.py::test_only_the_called_command_is_imported[methods]",
    "core/test_imports.py::test_core_works_without[absent0]",
    "core/test_packaging.py::test_every_module_of_an_installed_wheel_can_be_imported",
    "methods/test_clusters.py::test_kernels_and_references_agree_over_many_steps[clusterkv-more3-triton]",
    "methods/test_icecache.py",
    "methods/test_icecache_reuse.py",
    "ops/_machinery/test_ops.py::test_kernel_equals_reference[best_pages",
    "ops/_machinery/test_ops.py::test_kernel_equals_reference[page_peaks",
    "ops/_machinery/test_ops.py::test_kernel_equals_reference[sparse_attention",
    "ops/_machinery/test_ops.py::test_kernel_equals_reference[visit_nodes",
    "ops/icecache/test_page_peaks.py",
    "ops/icecache/test_plant_tree.py",
    "ops/icecache/test_visit_nodes.py::test_best_nodes_of_many_are_expanded",
    "ops/store/test_store_machine.py",
    "patches/test_captured.py::test_other_weights",
    "patches/test_families.py::test_decode_is_one_graph[gpt_oss]",
    "patches/test_families.py::test_full_budget_is_dense_and_generates_the_same[gemma3_text]",
    "patches/test_families.py::test_full_budget_is_dense_and_generates_the_same[gpt_oss]",
    "patches/test_families.py::test_full_budget_is_dense_and_generates_the_same[qwen3_moe]",
    "patches/test_generate.py::test_auto_compiled_generate_as_unpatched[prompt of one token]",
    "patches/test_generate.py::test_auto_compiled_generate_is_one_graph[icecache]",
    "patches/test_generate.py::test_auto_compiled_generate_is_one_graph[pariskv]",
    "patches/test_models.py::test_compiled_decode_is_dense_and_compiles_once[quest-llama-4]",
    "patches/test_models.py::test_each_row_of_a_padded_batch_is_that_prompt_alone",
    "patches/test_use.py::test_interrupted_prompt_cannot_be_continued[model.layers.2.mlp-memory]",
    "patches/test_use.py::test_ragged_prompt_in_chunks_equals_one_prompt[quest-True]",
    "tools/test_sanitize.py",
)


def slow_of(logs: list[str]) -> list[str]:
    """The slow tests of logs with the durations of all setups, calls and teardowns."""
    found: set[str] = set()
    for log in logs:
        seconds: Counter[str] = Counter()
        for line in re.finditer(r"^ *([\d.]+)s +(?:setup|call|teardown) +(tests/\S+::.*?) *$", log, re.M):
            seconds[line[2]] += float(line[1])
        found |= {name for name, s in seconds.items() if s > LIMIT}
    kept = tuple(f"tests/{name}" for name in KEPT)
    return sorted(name for name in found if not name.startswith(kept))


def are_slow(items: list) -> list:
    """The slow tests among collected tests."""
    listed, fixtures = {*FILE.read_text().splitlines()}, {f"tests/{name}" for name in FIXTURES}
    needs = lambda x: {f"{x.nodeid.partition('::')[0]}::{f}" for f in getattr(x, "fixturenames", ())}  # noqa: E731
    return [x for x in items if x.nodeid in listed or needs(x) & fixtures]


def order(item) -> tuple[bool, bool]:
    """Slow tests come first, so that the last test to end is a short one; and first of all the tests of FIRST."""
    return "slow" not in item.keywords, not item.nodeid.startswith(tuple(f"tests/{name}" for name in FIRST))


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in slow_of([Path(log).read_text() for log in sys.argv[1:]])))
