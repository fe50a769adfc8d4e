"""A chat server with the API of OpenAI: POST /v1/chat/completions, one request at a time.

    python examples/server.py --model MODEL --port 8000 &
    curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "What is a cache?"}]}'

`--requests N` ends the server after N requests. For many users at a time use examples/serve.sh: vLLM with our plugin.
"""
import itertools
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from common import load, options

import torchsparsekv

PLAIN = "{% for m in messages %}{{ m['content'] }} {% endfor %}"  # for a tokenizer without a chat template

o = options(__doc__.splitlines()[0], port=8000, requests=0, method="pariskv", budget=128, max_length=4096)
model, tokenizer = load(o.model)
tokenizer.chat_template = tokenizer.chat_template or PLAIN


def answer(asked: dict) -> dict:
    """The answer to a request, in the format of OpenAI."""
    given = tokenizer.apply_chat_template(
        asked["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = given.input_ids.to(model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.get("max_tokens", 64), do_sample=False
    )
    text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    used = {"prompt_tokens": ids.shape[1], "completion_tokens": out.shape[1] - ids.shape[1]}
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": used}


class Chat(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            code, said = 200, answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except (KeyError, TypeError, ValueError) as e:
            code, said = 400, {"error": {"message": f"{type(e).__name__}: {e}"}}
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())


with torchsparsekv.patch(model, o.method, budget=o.budget, max_length=o.max_length) as handle:
    server = HTTPServer(("127.0.0.1", o.port), Chat)
    print(f"listening on port {server.server_port}", flush=True)
    for _ in range(o.requests) if o.requests else itertools.count():
        server.handle_request()
    print(handle.report())
