"""Code that benchmarks of speed share: shapes of models, checks of options, timing."""
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchsparsekv.method import Method, check_device, check_skip_layers
from torchsparsekv_benchmarks._options import Setup, at_least

# Real shapes, random weights. `kv` is what matters here: layers, heads, head_dim.
SHAPES: dict[str, dict] = {
    "llama-3.1-8b": dict(
        model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=1 << 21,
    ),
    "llama-3.1-70b": dict(
        model_type="llama", num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=1 << 21,
    ),
    "qwen3-8b": dict(
        model_type="qwen3", num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=1 << 21,
    ),
    "qwen2.5-7b-1m": dict(
        model_type="qwen2", num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=1 << 22,
    ),
    "tiny": dict(
        model_type="llama", num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=1000, max_position_embeddings=1 << 17,
    ),
}  # fmt: skip
AHEAD = 4  # steps that are begun before the first of those that are timed one by one


def prepare(
    methods: Sequence[str], options: object = None, make: Callable[[str], Method] | None = None
) -> torch.device:
    """The device to measure on; raises at once, and not after minutes, where there is none or an option is refused.
    `make`: how a benchmark makes a method of its name, if not as `Setup` does."""
    check(methods, options)
    made = [(make or _setup(options).method)(name) for name in methods]
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a CUDA device")
    device = torch.device("cuda")
    for method in made:
        check_device(device, method)
    return device


def _setup(options: object) -> Setup:
    return options if isinstance(options, Setup) else Setup()


def check(methods: Sequence[str], options: object = None) -> None:
    """Raises where a method is refused, a shape unknown, or a number makes no sense, of the options that these have."""
    shape, locality = getattr(options, "shape", None), getattr(options, "locality", 1)
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; available: {', '.join(SHAPES)}")
    if not 0 <= locality <= 1:
        raise ValueError(f"locality must be between 0 and 1, got {locality}")
    least_one = ("context", "contexts", "steps", "repeats", "points")
    at_least(options, **{x: 1 for x in least_one if hasattr(options, x)})
    if shape is not None:
        _check_shape(shape, options)
    _setup(options).check(methods)


def _check_shape(name: str, options: Any) -> None:
    """Raises where a model of this shape has too few layers or positions."""
    shape = SHAPES[name]
    all_of_it, layers = shape["num_hidden_layers"], getattr(options, "layers", 0)
    if not 0 <= layers <= all_of_it:
        raise ValueError(f"layers must be from 1 to {all_of_it} ({name}), or 0 for all layers, got {layers}")
    check_skip_layers(getattr(options, "skip_layers", 0), layers or all_of_it)
    if not hasattr(options, "grows"):
        return
    longest = max(options.contexts) if hasattr(options, "contexts") else options.context
    positions, grows = shape["max_position_embeddings"], options.grows
    if longest + grows > positions:
        raise ValueError(
            f"contexts must be at most {positions - grows} ({name} has {positions} positions, a run adds {grows} "
            f"tokens), got {longest}"
        )


def build(shape: str, device: torch.device, shapes: Mapping[str, dict] = SHAPES, layers: int = 0):
    """A model of a shape with random weights, made on the device. It has `layers` layers, if given."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(shapes[shape]) | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def time_loop(step: Callable[[int], object], steps: int, repeats: int = 3) -> float:
    """Median over `repeats` of the milliseconds per call of `steps` calls in a row, by device events."""
    times = []
    for r in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for i in range(steps):
            step(r * steps + i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / steps)
    return statistics.median(times)


def time_each(step: Callable[[int], object], steps: int) -> list[float]:
    """Milliseconds of each of `steps` calls in a row, by device events between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    for i in range(AHEAD):  # so that the device does not wait for the first ones that count
        step(i)
    events[0].record()
    for i in range(steps):
        step(AHEAD + i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def time_graph(
    calls: Sequence[Callable[[], object]], refresh: Callable[[], object] = lambda: None, repeats: int = 9
) -> float:
    """Microseconds per call: the calls (each with inputs of its own) captured in one CUDA graph, median of replays.

    `refresh` runs before every replay, outside the timed part: it puts new values into the captured inputs.
    """
    for f in calls:
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in calls:
            f()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        refresh()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])
