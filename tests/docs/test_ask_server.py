"""The client of examples/ask_server.py, and the command of examples/serve.sh, against stand-ins for a server."""
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Server(BaseHTTPRequestHandler):
    """Answers in pieces, once three requests are there at the same time."""

    together = threading.Barrier(3)

    def _say(self, kind: str, *parts: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in parts:
            self.wfile.write(part.encode())

    def do_GET(self):
        self._say("application/json", json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] is True
        number = asked["messages"][0]["content"].split("Question ")[1].split(":")[0]
        self.together.wait(30)
        chunk = {"id": "0", "object": "chat.completion.chunk", "created": 0, "model": "tiny"}
        choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None} for text in ("answer ", number)]
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        said = [chunk | {"choices": [c]} for c in choices] + [chunk | {"choices": [], "usage": usage}]
        self._say("text/event-stream", *(f"data: {json.dumps(x)}\n\n" for x in said), "data: [DONE]\n\n")

    def log_message(self, *_):
        pass


def test_questions_are_asked_at_once_and_answers_come_in_pieces():
    pytest.importorskip("openai")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        command = [sys.executable, str(EXAMPLES / "ask_server.py"), "--url", url, "--requests", "3", "--words", "5"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr[-2000:]
    for i in range(3):
        assert f"2 tokens: 'answer {i}'" in done.stdout
    assert "3 requests of tiny: 6 tokens in" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("asked", "method", "block"),
    [({}, "pariskv", "64"), ({"METHOD": "quest"}, "quest", "16"), ({"BLOCK": "32"}, "pariskv", "32")],
)
def test_recipe_starts_vllm_with_the_plugin(tmp_path, asked, method, block):
    """Stand-ins for python and vllm say what they were called with."""
    for name, text in {"python": "echo TORCHSPARSEKV", "vllm": "printf '%s\\n' \"$@\""}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "KV": "host"} | asked
    script = str(EXAMPLES / "serve.sh")
    done = subprocess.run(["bash", script, "some model", "--port", "8001"], capture_output=True, text=True, env=env)
    said = done.stdout.splitlines()
    assert said[:4] == ["serve", "some model", "--attention-backend", "TORCHSPARSEKV"]
    given = json.loads(said[said.index("--additional-config") + 1])
    assert given == {"torchsparsekv": {"method": method, "budget": 1024, "kv": "host"}}
    assert said[said.index("--block-size") + 1] == block
    assert said[-2:] == ["--port", "8001"]
    done = subprocess.run(["bash", script], capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "usage: serve.sh MODEL" in done.stderr
