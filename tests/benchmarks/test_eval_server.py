"""`eval-server` against a stand-in for a server, which knows some of the answers."""
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from torchsparsekv_benchmarks.quality import server
from torchsparsekv_benchmarks.quality.ruler.fit import Ruler


class Words:
    """A tokenizer that takes a text word by word."""

    bos_token_id = chat_template = None

    def __init__(self):
        self.ids, self.words = {}, []

    def __call__(self, text, add_special_tokens):
        new = [w for w in text.split() if w not in self.ids]
        for w in new:
            if w not in self.ids:
                self.ids[w] = len(self.words)
                self.words.append(w)
        return {"input_ids": [self.ids[w] for w in text.split()]}


@pytest.fixture
def served(monkeypatch):
    """Answers requests that come two at a time: those of even samples rightly."""
    words, seen, together = Words(), [], threading.Barrier(2)
    monkeypatch.setattr(server, "opened", lambda *_: SimpleNamespace(tokenizer=words))
    known = {}

    class Server(BaseHTTPRequestHandler):
        def _say(self, code, body):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            self._say(200, {"data": [{"id": "tiny"}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(asked)
            together.wait(30)
            if asked["max_tokens"] != known["tokens"]:
                return self._say(400, {"error": "another number of tokens"})
            self._say(200, {"choices": [{"text": known.get(tuple(asked["prompt"]), "nothing")}]})

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{http.server_port}/v1", words=words, seen=seen, known=known)
    http.shutdown()


def test_answers_are_scored_and_requests_run_together(served, tmp_path, capsys):
    prompts = Ruler(served.words)
    for i in range(4):
        sample = prompts.sample("niah_multikey_2", 600, i)
        served.known["tokens"] = sample.new_tokens
        if i % 2 == 0:
            served.known[tuple(sample.prompt)] = f"It is {sample.answers[0]}."
    o = server.Options(url=served.url, lengths=(600,), tasks=("niah_multikey_2",), samples=4, requests=2)
    rows = server.run(o, tmp_path / "out.json")
    assert [r["score"] for r in rows] == [1, 0, 1, 0]
    assert all(x["model"] == "tiny" and x["temperature"] == 0 for x in served.seen)
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    assert "0.289" in capsys.readouterr().out  # the standard error of four scores, two of them 1


def test_what_the_server_refuses_is_told(served):
    served.known["tokens"] = -1
    o = server.Options(url=served.url, lengths=(600,), tasks=("niah_multikey_2",), samples=2, requests=2)
    with pytest.raises(RuntimeError, match=r"/completions answers 400: .*another number of tokens"):
        server.run(o)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(tasks=("nothing",)), "unknown task nothing; available: niah_"),
        (dict(model="recall"), "no server runs the recall model"),
        (dict(requests=0), "requests must be at least 1, got 0"),
        (dict(lengths=(600, 20), tasks=("niah_multikey_2",)), "niah_multikey_2 does not fit 20 tokens"),
        (dict(url="http://127.0.0.1:9/v1", lengths=(600,), tasks=("vt",)), "no server answers at http://127.0.0.1:9/v1/models"),
    ],
)
def test_bad_input_is_told(given, message, served):
    with pytest.raises((ValueError, RuntimeError), match=message):
        server.run(server.Options(**given))
