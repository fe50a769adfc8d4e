"""Who may import whom, what the core must do without, and the limits on size."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKS = {ROOT / "torchsparsekv/ops", ROOT / "torchsparsekv/patches"}
FOLDERS = ("torchsparsekv", "ops", "patches", "csrc", "tests", "benchmarks")
MAX_FILE, MAX_FUNCTION = 400, 40
TOO_LONG = {"ops/gather/fetch.py": {"_fetch"}}  # to be taken apart; nothing may be added here

# What each part may import of this package. The longest matching name counts; None: anything. A new module in
# torchsparsekv/ needs a row; a new op, method, family or command does not.
ARROWS: dict[str, set[str] | None] = {
    "torchsparsekv.ops": {"ops"},
    "torchsparsekv.host": set(),
    "torchsparsekv.state": {"ops", "host"},
    "torchsparsekv.method": {"ops", "state", "zoo"},  # zoo: only to find the files in it
    "torchsparsekv.zoo": {"method", "ops", "state", "zoo"},
    "torchsparsekv.report": {"state"},
    "torchsparsekv.probe": {"method", "ops", "state"},
    "torchsparsekv.patches": {"patches", "method", "ops", "state", "host", "report"},
    "torchsparsekv.api": {"method", "patches"},
    "torchsparsekv.cli": {"commands"},
    "torchsparsekv.commands": None,
    "torchsparsekv": {"api"},
}
# Third-party packages beside torch, and the only places that may import them.
GUESTS = {
    "transformers": ("torchsparsekv.patches", "torchsparsekv.commands"),
    "triton": ("torchsparsekv.ops._triton",),
    "typer": ("torchsparsekv.commands",),
}


def files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in found if not LINKS & set(p.parents))


PACKAGE = files("torchsparsekv", "ops", "patches")
EVERYTHING = [*files(*FOLDERS), ROOT / "setup.py"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "torchsparsekv" else ("torchsparsekv", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def inside(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, wherever in it; `from package import x` counts as package.x."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            whole = node.module == "torchsparsekv"
            found |= {f"{node.module}.{a.name}" if whole else str(node.module) for a in node.names}
    return found


@pytest.mark.parametrize("path", PACKAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows(path):
    module = name_of(path)
    rule = max((r for r in ARROWS if inside(module, r)), key=len)
    assert rule != "torchsparsekv" or module == rule, f"{module} has no row in ARROWS"
    used, allowed = imports(path), ARROWS[rule]
    own = {u.split(".")[1] if "." in u else "" for u in used if inside(u, "torchsparsekv")}
    assert allowed is None or own <= allowed, f"{module} may import {sorted(allowed)} of this package"
    for guest, hosts in GUESTS.items():
        if any(inside(u, guest) for u in used):
            assert any(inside(module, h) for h in hosts), f"{guest} may be imported in {hosts} only"
    known = {"torch", "torchsparsekv", "tqdm", *GUESTS, *sys.stdlib_module_names}
    assert {u.split(".")[0] for u in used} <= known


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
        "from torchsparsekv.ops._registry import load_all; assert len(load_all()) > 5"
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


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    long = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body and body[-1].end_lineno - body[0].lineno + 1 > MAX_FUNCTION:
                long.add(node.name)
    assert long == TOO_LONG.get(path.relative_to(ROOT).as_posix(), set())


def test_nothing_points_to_a_machine():
    """No path that exists only where this was written."""
    place = re.compile(r"(?<![\w.~/])/(?:work|root|home|Users|mnt)/\w")
    texts = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cpp", ".md")]
    texts += [p for p in ROOT.iterdir() if p.suffix in (".md", ".toml", ".py") or p.name in ("Makefile", "LICENSE")]
    texts += [ROOT / ".ci/run", ROOT / ".pre-commit-config.yaml"]
    found = [str(p) for p in texts if place.search(p.read_text())]
    assert not found
