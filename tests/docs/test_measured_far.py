"""What docs/results.md says of 2M tokens, and of the loop around a step, is that of the files."""
from test_cli import ROOT
from test_results import rows_of


def test_how_long_two_million_tokens_would_take_to_fill():
    """Of 28 layers, 28 heads and 6.5 billion parameters in layers, from 32 of 32 and 7.0."""
    seconds = {r["context"]: r["ttft_ms"] / 1e3 for r in rows_of("h200_prefill_pages.json") if r["method"] == "quest"}
    linear = 2 * seconds[32768] - seconds[65536] / 2  # of 32K; what is left grows with the square
    (chunked,) = (r["ttft_ms"] / 1e3 for r in rows_of("h200_prefill_chunks.json") if r["method"] == "quest")
    square = (chunked - 4 * linear) / 4**2
    minutes = (64 * linear * 6.5 / 7.0 + 64**2 * square * (28 * 28) / (32 * 32)) / 60
    assert f"would take an H200 some {minutes:.0f} minutes" in " ".join((ROOT / "docs/results.md").read_text().split())


def test_the_loop_of_the_host():
    us = {r["cache"]: r["us"] for r in rows_of("cpu_host_loop.json")}
    text = " ".join((ROOT / "docs/results.md").read_text().split())
    assert f"{us['dynamic']:.0f} us with transformers' dynamic cache, {us['static']:.0f} with its static one" in text
    assert f"and {us['captured']:.0f} with a captured step" in text


def test_two_million_tokens():
    floor, quest = rows_of("h200_decode_2m.json")
    text = " ".join((ROOT / "docs/results.md").read_text().split())
    ms, least = quest["tpot_ms"], floor["tpot_ms"]
    assert f"takes {ms:.2f} ms, {ms / least:.2f} of the {least:.2f} that a step over 256 tokens takes" in text
    assert f"{quest['host_GiB']:.1f} GiB are on the host and {quest['device_GiB']:.1f} on the GPU" in text
    dense, digests = (2 * 2 * 4 * 128 * 2 * quest["context"], 26 * 4 * quest["context"] // 16 * 2 * 128)  # bytes
    assert f"have {dense / 1e9:.1f} GB of keys and values, the digests of the 26 others {digests / 1e9:.1f} GB" in text
    assert f"together {(dense + digests) / 4.2e9:.1f} ms at 4.2 TB/s" in text
