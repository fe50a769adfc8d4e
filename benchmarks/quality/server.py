"""Score the answers of a running server on the samples of `eval`.

The server has the API of OpenAI and takes prompts as token ids, as `vllm serve` does. So a server and `patch` answer
the same prompts, and their scores of the same task, length and sample can be compared.
"""
import concurrent.futures
import dataclasses
import itertools
import json
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import at_least, different, option
from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks.quality import ruler, suite
from torchsparsekv_benchmarks.quality.options import RECALL
from torchsparsekv_benchmarks.quality.pretrained import opened
from torchsparsekv_benchmarks.quality.ruler.fit import Sample, found

BENCHMARK = "eval-server"
PATIENCE = 600  # seconds until a request is given up


@dataclass(frozen=True)
class Options:
    url: str = option("http://127.0.0.1:8000/v1", "The server's API.")
    model: str = option("qwen-1.5b", "The server's model, named as in `eval`. Its tokenizer makes the prompts.")
    yarn: float = option(1.0, "The YaRN factor with which the server was started; 1: none.")
    lengths: tuple[int, ...] = option((32768,), "Tokens of prompt and answer together, comma-separated.")
    tasks: tuple[str, ...] = option(("niah_multikey_2", "vt", "code_constant"), "Tasks, comma-separated.")
    samples: int = option(16, "Samples per task and length.")
    requests: int = option(16, "Requests at the same time.")


def asked(url: str, body: dict | None = None) -> dict:
    """The answer of the server, in JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"{url} answers {e.code}: {e.read().decode(errors='replace')[:300]}") from e
    except OSError as e:
        raise RuntimeError(f"no server answers at {url}: {e}") from e


def answered(o: Options, served: str, sample: Sample) -> dict:
    """Greedy, as in `eval`."""
    begin = time.perf_counter()
    body = {"model": served, "prompt": sample.prompt, "max_tokens": sample.new_tokens, "temperature": 0}
    text = asked(f"{o.url}/completions", body)["choices"][0]["text"]
    score = found(text, sample.answers, sample.wrong)
    return {"score": score, "output": text, "seconds": round(time.perf_counter() - begin, 3)}


def evaluate(o: Options, served: str, prompts: ruler.Ruler) -> Iterator[dict]:
    """Rows in the order of the samples; the requests of a task run together."""
    with concurrent.futures.ThreadPoolExecutor(o.requests) as pool:
        for length, task in itertools.product(o.lengths, o.tasks):
            samples = [prompts.sample(task, length, i) for i in range(o.samples)]
            answers = pool.map(lambda sample: answered(o, served, sample), samples)
            for i, (sample, answer) in enumerate(zip(samples, answers)):
                yield {"task": task, "length": length, "index": i, "prompt_tokens": len(sample.prompt)} | answer


def summary(rows: list[dict]) -> list[dict]:
    """The mean score of each task and length, with its standard error."""
    out = []
    for (task, length), group in itertools.groupby(rows, lambda r: (r["task"], r["length"])):
        scores = [r["score"] for r in group]
        mean, n = statistics.fmean(scores), len(scores)
        error = statistics.stdev(scores) / n**0.5 if n > 1 else 0.0
        out.append({"task": task, "length": length, "samples": n, "score": round(mean, 3), "error": round(error, 3)})
    return out


def run(o: Options, out: Path | None = None) -> list[dict]:
    """Evaluate, print the table, write the rows to `out`."""
    at_least(o, samples=1, requests=1, lengths=1)
    different(o, "lengths", "tasks")
    if o.model == RECALL:
        raise ValueError("no server runs the recall model: name a language model, as with --model qwen-1.5b")
    prompts = ruler.Ruler(opened(o.model, o.yarn).tokenizer, suite.TASKS)
    unknown = [t for t in o.tasks if t not in prompts.tasks]
    if unknown:
        raise ValueError(f"unknown task {', '.join(unknown)}; available: {', '.join(prompts.tasks)}")
    for length, task in itertools.product(o.lengths, o.tasks):
        prompts.sample(task, length, 0)  # refuses a task that does not fit
    served = asked(f"{o.url}/models")["data"][0]["id"]
    total = len(o.lengths) * len(o.tasks) * o.samples
    rows = list(watched(evaluate(o, served, prompts), total, "sample"))
    _results.save(BENCHMARK, rows, dataclasses.asdict(o), out)
    _results.print_table(summary(rows))
    return rows
