"""Which tests `make test` leaves to `make full`, so that it takes less than twelve minutes on two cores, all that it
sets up included: those in tests/tools/slow.txt, and those that need one of FIXTURES.

    python -m pytest -n auto --dist worksteal --durations=0 > log      and then      python tests/tools/slow.py log

writes the list: what takes longer than LIMIT in any of the logs, but for what KEPT names, one or a few of each kind of
which all are long. A log charges a fixture to the first test that needs it, so no list can tell who does. It charges
what is compiled to the first test that compiles it: remove what torch has cached of compiled graphs before.
"""
import re
import sys
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
LIMIT = 1.0  # seconds of one core
FIXTURES = ("test_bench.py::whole", "test_demo.py::shown", "test_report.py::evaluated", "test_segments.py::measured",
            "test_turns.py::measured")  # fmt: skip
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


def slow_of(logs: list[str]) -> list[str]:
    """By logs of pytest, with the durations of all setups, calls and teardowns."""
    found: set[str] = set()
    for log in logs:
        seconds: Counter[str] = Counter()
        for line in re.finditer(r"^ *([\d.]+)s +(?:setup|call|teardown) +(tests/\S+::.*?) *$", log, re.M):
            seconds[line[2]] += float(line[1])
        found |= {name for name, s in seconds.items() if s > LIMIT}
    kept = tuple(f"tests/{name}" for name in KEPT)
    return sorted(name for name in found if not name.startswith(kept))


def are_slow(items: list) -> list:
    """Of collected tests."""
    listed, fixtures = {*FILE.read_text().splitlines()}, {f"tests/{name}" for name in FIXTURES}
    needs = lambda x: {f"{x.nodeid.partition('::')[0]}::{f}" for f in getattr(x, "fixturenames", ())}  # noqa: E731
    return [x for x in items if x.nodeid in listed or needs(x) & fixtures]


if __name__ == "__main__":
    FILE.write_text("".join(f"{name}\n" for name in slow_of([Path(log).read_text() for log in sys.argv[1:]])))
