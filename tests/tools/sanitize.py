"""Every kernel of every op, at small shapes, under compute-sanitizer's memcheck and racecheck.

    make sanitize > sanitize.log
    python tests/tools/sanitize.py [--tools memcheck,racecheck] [--ops append,fetch]

With --tests tests/ops/icecache/test_visit_nodes.py,... it runs the GPU tests of these files instead, at larger shapes.

Needs a GPU and the tool of the CUDA toolkit. Exits with 1 if it reports anything but what is explained below.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
# What racecheck reports and is none, by kernel; the reason is where it happens.
EXPLAINED = {
    "racecheck": {
        "_boundary": "ops/clusters/find_boundary.py: warps that hold the same rows store the same sum",
        r"cudnn_\w+": "attention of cuDNN, which torch takes for prompts: not ours",
    }
}
SHAPES = [
    dict(dim=dim, group=group, heads=heads, lengths=lengths, dtype=dtype)
    for dim, group, heads, lengths in (
        (16, 2, 2, [37, 20]), (80, 3, 1, [60, 1]), (128, 4, 2, [33, 64]), (64, 1, 2, [40, 9]),
    )
    for dtype in ("float32", "bfloat16")
]


def run_ops(names: list[str]) -> None:
    """In the process that is watched: every implementation of every op, on the GPU."""
    import torch
    from cases import MANY_TOKENS, OPS
    from cases_packed import TAKING, packed
    from kernels import on
    from world import World

    from torchsparsekv.ops._machinery.registry import load_all

    for name, entry in load_all().items():
        if names and name not in names:
            continue
        for kind in entry.chain.kinds:
            ran = 0
            for shape in SHAPES:
                for way in range(3):
                    given = {**shape, "dtype": getattr(torch, shape["dtype"])}
                    pick = lambda *options, way=way: options[way % len(options)]  # noqa: E731
                    w = World(tokens=5 if name in MANY_TOKENS else 1, pick=pick, **given)
                    things = OPS[name](w)
                    for taken in (things, packed(name, things)) if name in TAKING else (things,):
                        try:
                            entry.run(kind, *on(torch.device("cuda"), taken))
                            ran += 1
                        except RuntimeError as e:  # csrc/ says which shapes it has no kernel for
                            if "cannot run here" not in str(e):
                                raise
            torch.cuda.synchronize()
            print(f"ran {name} {kind} {ran} times", flush=True)


def found(text: str, tool: str) -> tuple[list[str], list[str]]:
    """What a log reports: lines without an explanation, and with one."""
    lines = [x for x in text.splitlines() if re.match(r"=+ +(Error|Warning|Invalid|Program hit|Race reported)", x)]
    known = [x for x in lines if any(re.search(rf"\b{k}\b", x) for k in EXPLAINED.get(tool, {}))]
    return [x for x in lines if x not in known], known


def watch(tool: str, ops: str, tests: str) -> bool:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).is_file():
        raise SystemExit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    watched = [str(here), "--watched", "--ops", ops]
    if tests:
        watched = ["-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", "-m", "gpu", *tests.split(",")]
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--print-limit", "1000", sys.executable, *watched],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    wrong, known = found(done.stdout, tool)
    print(done.stdout)
    print(f"{tool}: rc {done.returncode}, {len(wrong)} reports, {len(known)} more that are explained:")
    for kernel, why in EXPLAINED.get(tool, {}).items():
        print(f"    {kernel}: {why}")
    return done.returncode == 0 and not wrong and (" passed" if tests else "ran ") in done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--ops", default="")
    parser.add_argument("--tests", default="", help="files of tests that need a GPU, instead of ops")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.watched:
        run_ops([x for x in o.ops.split(",") if x])
        return 0
    good = [watch(tool, o.ops, o.tests) for tool in o.tools.split(",")]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
