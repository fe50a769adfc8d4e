"""Build the wheel, and take a first token from it in an empty environment of every Python that is here.

    make wheel                                     # PYTHONS="python3.10 python3.13" chooses, TORCH=torch==2.11.0 too

Each environment gets the wheel and torch alone at first: the library must import, list its methods, and say what
patch() lacks. Then transformers comes, and a small model answers. Triton is hidden from the import in either case.
"""
import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = [f"python3.{minor}" for minor in range(10, 14)]
BARE = """
import importlib.util, json, sys, time
sys.modules["triton"] = None  # an import of it fails
begin = time.perf_counter()
import torch
between = time.perf_counter()
import torchsparsekv
took = time.perf_counter() - between
assert importlib.util.find_spec("transformers") is None
assert len(torchsparsekv.methods()) >= 13
try:
    torchsparsekv.patch(None)
except ImportError as e:
    assert "transformers" in str(e) and "pip install 'torchsparsekv[hf]'" in str(e), e
else:
    raise SystemExit("patch() needs transformers and did not say so")
print(json.dumps({"torch": torch.__version__, "import torch (s)": round(between - begin, 2),
                  "import torchsparsekv (s)": round(took, 2), "version": torchsparsekv.__version__}))
"""
TOKEN = """
import json, sys, time
sys.modules["triton"] = None
begin = time.perf_counter()
import torch, transformers, torchsparsekv
config = transformers.LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.randint(3, 128, (1, 500))
want = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
with torchsparsekv.patch(model, budget=512, max_length=1024) as handle:
    first = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    took = time.perf_counter() - begin
    got = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    steps = [r.steps for r in handle.report().layers]
assert torch.equal(first, want[:, :501]) and torch.equal(got, want), (first, got, want)
assert steps == [3] * 4, steps
print(json.dumps({"transformers": transformers.__version__, "process to first token (s)": round(took, 1)}))
"""


def called(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> Path:
    """The wheel of this checkout; what a build before left behind must not get into it."""
    for left in (ROOT / "build", *ROOT.glob("*.egg-info")):
        if left.name == "build":
            shutil.rmtree(left, ignore_errors=True)
    called(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (wheel,) = out.glob("torchsparsekv-*.whl")
    return wheel


def tried(python: str, wheel: Path, torch: str) -> dict:
    """What an empty environment of this Python says."""
    with tempfile.TemporaryDirectory() as folder:
        here, bin = Path(folder), Path(folder) / "env/bin"
        begin = time.perf_counter()
        called(python, "-m", "venv", here / "env", cwd=here)
        install = (bin / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir")
        called(*install, torch, wheel, cwd=here)
        found = json.loads(called(bin / "python", "-c", BARE, cwd=here).splitlines()[-1])
        assert found.pop("version") == wheel.name.split("-")[1]
        called(*install, f"{wheel}[hf]", cwd=here)
        found |= json.loads(called(bin / "python", "-c", TOKEN, cwd=here).splitlines()[-1])
        return found | {"empty to first token (s)": round(time.perf_counter() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch", help="what pip is told for torch")
    parser.add_argument("pythons", nargs="*", default=[p for p in PYTHONS if runs(p)])
    o = parser.parse_args()
    wheel = build(ROOT / "dist")
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.2f} MB", flush=True)
    for python in o.pythons or [sys.executable]:
        print(python, json.dumps(tried(python, wheel, o.torch)), flush=True)


def runs(python: str) -> bool:
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-c", "pass"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
