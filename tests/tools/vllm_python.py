"""Install the Python files of a vLLM release, without its native code: `python tests/tools/vllm_python.py 0.33.0`.

Its wheels are built for GPUs and hold hundreds of megabytes of kernels. Their Python files are enough for its engine,
and tests/support/vllm_cpu.py makes a vLLM for CPUs of them. What it imports is in tests/engines/requirements.txt.
"""
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

NATIVE = (".so", "vllm/vllm-rs")  # ends of names that stay out


def install(version: str, to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", folder, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as z:
            z.extractall(to, [n for n in z.namelist() if not n.endswith(NATIVE)])


if __name__ == "__main__":
    install(sys.argv[1], Path(sysconfig.get_paths()["purelib"]))
