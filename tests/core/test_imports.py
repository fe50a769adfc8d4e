"""Which module may import which, and what the library works without."""
import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

FOLDERS = ("torchsparsekv", "ops", "patches", "csrc", "tests", "benchmarks", "examples")

CORE = {"api", "host", "method", "ops", "state", "_methods"}  # for benchmarks that take the parts apart
# What each part may import of this package: modules, and what is in them; `api` is also the package as a whole. The
# longest matching name counts. A new module in torchsparsekv/ or benchmarks/ needs a row; a new op, method, family or
# command, and a new module in a group of benchmarks, do not.
ARROWS: dict[str, set[str]] = {
    "torchsparsekv.ops": {"ops"},
    "torchsparsekv.host": set(),
    "torchsparsekv.state": {"ops", "host"},
    "torchsparsekv.method": {"ops", "state", "report", "_methods"},  # _methods: only to find the files in it
    "torchsparsekv._methods": {"method", "ops", "state", "report", "_methods"},
    "torchsparsekv.report": {"ops", "state"},
    "torchsparsekv.probe": {"method", "ops", "state"},
    "torchsparsekv.patches": {"patches", "method", "ops", "state", "host", "report"},
    "torchsparsekv.engines": {"engines", "method", "_methods", "ops", "state", "host"},
    "torchsparsekv.api": {"method", "ops", "patches"},
    "torchsparsekv.check": {"method", "ops", "state"},
    "torchsparsekv.extension": {"check", "method", "ops", "state"},
    "torchsparsekv.trace": {"api", "ops", "probe", "state"},
    "torchsparsekv_benchmarks": set(),
    "torchsparsekv_benchmarks._table": set(),
    "torchsparsekv_benchmarks._progress": set(),
    "torchsparsekv_benchmarks._options": {"method"},
    "torchsparsekv_benchmarks._traces": set(),
    "torchsparsekv_benchmarks._results": {"api", "benchmarks._table"},
    "torchsparsekv_benchmarks.speed": {
        *CORE, "patches", "engines", "benchmarks._options", "benchmarks._progress", "benchmarks._results",
        "benchmarks._traces", "benchmarks.quality", "benchmarks.speed",
    },
    "torchsparsekv_benchmarks.recall_model": {"benchmarks._results", "benchmarks.recall_model"},
    "torchsparsekv_benchmarks.quality": {  # its scripts take the parts apart; one has a method of its own
        *CORE, "patches", "probe", "benchmarks._options", "benchmarks._progress", "benchmarks._results",
        "benchmarks._traces", "benchmarks.quality", "benchmarks.recall_model",
    },
    "torchsparsekv_benchmarks.research": {
        "method", "ops", "probe", "state", "benchmarks._results", "benchmarks._traces", "benchmarks.quality",
        "benchmarks.research",
    },
    "torchsparsekv_benchmarks.quality.ruler": {"benchmarks.quality.ruler"},
    "torchsparsekv_benchmarks.report": {  # reads files, and runs nothing of what makes them
        "benchmarks.report", "benchmarks._progress", "benchmarks.quality.options", "benchmarks.quality.store",
        "benchmarks.quality.summary", "benchmarks.quality.text_summary", "benchmarks.recall_model.tasks",
    },
    "torchsparsekv_benchmarks.report.load": {"benchmarks.quality.store"},
    "torchsparsekv_benchmarks.report.style": set(),
    "torchsparsekv_benchmarks.report.markdown": {"benchmarks.report.load", "benchmarks.report.style"},
    "torchsparsekv_benchmarks.report.tables_code": {
        "method", "state", "benchmarks.report.markdown", "benchmarks.report.style",
    },
    "torchsparsekv_benchmarks.report.again": {"api", "benchmarks.report.load"},
    "torchsparsekv.commands": {"api", "method", "host", "patches", "benchmarks", "commands"},
    "torchsparsekv.cli": {"commands"},
    "torchsparsekv": {"api", "check", "method", "patches", "report"},
}  # fmt: skip
BOTH_WAYS = {
    ("torchsparsekv.method", "torchsparsekv._methods"),  # the first only finds the files in the other
}
# Third-party packages beside torch, and the only places that may import them.
GUESTS: dict[str, tuple[str, ...]] = {
    "transformers": (
        "torchsparsekv.patches", "torchsparsekv.commands", "torchsparsekv_benchmarks.speed",
        "torchsparsekv_benchmarks.quality", "torchsparsekv_benchmarks.recall_model", "torchsparsekv.trace",
    ),
    "packaging": ("torchsparsekv.patches",),  # transformers needs it too
    "triton": ("torchsparsekv.ops._machinery.triton",),
    "typer": ("torchsparsekv.commands",),
    "tqdm": ("torchsparsekv_benchmarks._progress",),
    "matplotlib": ("torchsparsekv_benchmarks.report",),
    "PIL": ("torchsparsekv_benchmarks.report.style",),
    "numpy": (
        "torchsparsekv_benchmarks.recall_model", "torchsparsekv_benchmarks.report.style",
        "torchsparsekv_benchmarks._traces", "torchsparsekv_benchmarks.quality.trace",
    ),
    "gguf": ("torchsparsekv_benchmarks.quality.real_model",),
    "safetensors": ("torchsparsekv_benchmarks.quality.pretrained",),
    "tokenizers": ("torchsparsekv_benchmarks.recall_model.model",),
    "vllm": ("torchsparsekv.engines", "torchsparsekv_benchmarks.speed.serve"),
    "flashinfer": ("torchsparsekv_benchmarks.speed._flashinfer",),
}  # fmt: skip


def files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return sorted(found)


PACKAGE = [p for p in files("torchsparsekv", "ops", "patches", "benchmarks") if p.name != "setup.py"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    first = ("torchsparsekv_benchmarks",) if parts[0] == "benchmarks" else ("torchsparsekv", parts[0])
    parts = parts if parts[0] == "torchsparsekv" else (*first, *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def row_of(module: str) -> str:
    return max((r for r in ARROWS if inside(module, r)), key=len)


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports when it runs; `from module import x` counts as module.x."""
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_what_their_row_allows(path):
    module = name_of(path)
    rule = row_of(module)
    assert rule not in ("torchsparsekv", "torchsparsekv_benchmarks") or module == rule, f"{module} has no row in ARROWS"
    used, allowed = imports(path), ARROWS[rule]
    own = {u.partition(".")[2] or "api" for u in used if inside(u, "torchsparsekv")}
    own |= {u.removeprefix("torchsparsekv_") for u in used if inside(u, "torchsparsekv_benchmarks")}
    bad = {u for u in own if not any(inside(u, a) for a in allowed)}
    assert not bad, f"{module} imports {sorted(bad)}, and may import {sorted(allowed)} of this package"
    for guest, hosts in GUESTS.items():
        if any(inside(u, guest) for u in used):
            assert any(inside(module, h) for h in hosts), f"{guest} may be imported in {hosts} only"
    known = {"torch", "torchsparsekv", "torchsparsekv_benchmarks", *GUESTS, *sys.stdlib_module_names}
    assert {u.split(".")[0] for u in used} <= known


def test_allowed_imports_have_no_cycle():
    """No module is imported, through others, by a module that it may import."""
    after: dict[str, set[str]] = {}
    for row, allowed in ARROWS.items():
        names = [f"torchsparsekv{'_' if inside(a, 'benchmarks') else '.'}{a}" for a in allowed]
        after[row] = {row_of(n) for n in names} | {r for r in ARROWS for n in names if inside(r, n)}
        after[row].discard(row)
    for first, other in BOTH_WAYS:
        assert other in after[first]
        assert first in after[other]
        after[first].remove(other)
    assert len([*graphlib.TopologicalSorter(after).static_order()]) == len(ARROWS)


# ---------------------------------------------------------------- shared ops know no method

SHARED = ("store", "index", "select", "gather", "rest", "attend", "_machinery")
FAMILY = re.compile(
    r"\b(?:icecache|pariskv|prkv\w*|pqcache|magicpig|shadowkv|snapkv|omnikv|h2o|raas|clusterkv|louiskv|retroinfer)\b"
    r"|\bops[./](?:clusters|engine)\b", re.I
)


@pytest.mark.parametrize("path", files(*(f"ops/{part}" for part in SHARED)), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_shared_op_names_no_family_and_no_method(path):
    """In imports, code, docstrings and comments."""
    assert not FAMILY.findall(path.read_text())


# ---------------------------------------------------------------- what it works without


def run(program: str) -> None:
    """In a fresh process, from the checkout."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OPTIONAL = ["triton", "transformers", "typer", "tqdm"]


@pytest.mark.parametrize("absent", [["triton"], ["transformers"], OPTIONAL])
def test_core_works_without(absent):
    """None in sys.modules makes an import fail as if the package were not installed."""
    run(
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import torchsparsekv; assert 'quest' in torchsparsekv.methods()\n"
        "from torchsparsekv.ops._machinery.registry import load_all; assert len(load_all()) > 5"
    )


def test_importing_and_listing_leaves_transformers_alone():
    run(
        "import sys, torchsparsekv; torchsparsekv.methods()\n"
        "bad = {'transformers', 'typer', 'torchsparsekv.patches'} & set(sys.modules); assert not bad, bad"
    )


def test_patch_without_transformers_says_what_is_missing():
    run(
        "import sys; sys.modules['transformers'] = None\n"
        "import torchsparsekv\n"
        "try: torchsparsekv.patch(None)\n"
        "except ImportError as e: assert 'transformers' in str(e)\n"
        "else: raise SystemExit('no error')"
    )


# ---------------------------------------------------------------- files


def test_no_test_file_imports_another():
    found = [p for p in files("tests") if any(u.startswith("test_") for u in imports(p))]
    assert not found


def test_nothing_points_to_a_machine():
    """No path that exists only where this was written."""
    place = re.compile(r"(?<![\w.~/])/(?:work|root|home|Users|mnt)/\w")
    texts = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cpp", ".md")]
    texts += [p for p in ROOT.iterdir() if p.suffix in (".md", ".toml", ".py") or p.name in ("Makefile", "LICENSE")]
    texts += [ROOT / ".ci/run", ROOT / ".pre-commit-config.yaml"]
    found = [str(p) for p in texts if place.search(p.read_text())]
    assert not found
