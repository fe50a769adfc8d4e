"""Ask a server with the API of OpenAI many questions at once, and print each answer as it comes.

    bash examples/serve.sh MODEL &
    python examples/ask_server.py --requests 8 --max-tokens 64

The script needs the package `openai`. All requests begin with the same long text, so a server with prefix caching
reads this text once.
"""
import argparse
import asyncio
import time

from openai import AsyncOpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--requests", type=int, default=4, help="at the same time")
parser.add_argument("--words", type=int, default=2000, help="of the part that all requests begin with")
parser.add_argument("--max-tokens", type=int, default=32)
o = parser.parse_args()


async def ask(client: AsyncOpenAI, model: str, number: int) -> int:
    """Stream one answer, print it, and return its number of tokens."""
    text = " ".join(f"word{i}" for i in range(o.words))
    question = {"role": "user", "content": f"{text}\nQuestion {number}: what is word{number}?"}
    began, first, said, tokens = time.perf_counter(), 0.0, "", 0
    stream = await client.chat.completions.create(
        model=model, messages=[question], max_tokens=o.max_tokens, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        for choice in chunk.choices:
            first = first or time.perf_counter() - began
            said += choice.delta.content or ""
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    print(f"request {number}: first piece after {first:.2f} s, {tokens} tokens: {said!r}", flush=True)
    return tokens


async def main() -> None:
    client = AsyncOpenAI(base_url=o.url, api_key="none")
    model = (await client.models.list()).data[0].id
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(ask(client, model, i) for i in range(o.requests))))
    took = time.perf_counter() - began
    print(f"{o.requests} requests of {model}: {tokens} tokens in {took:.1f} s, {tokens / took:.0f} tokens/s")


asyncio.run(main())
