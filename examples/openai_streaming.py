"""Streams with the real `openai` client: one as it comes, then many at a time, which the server computes in one batch.

pip install 'pagedjax[serve]' openai
pagedjax serve smollm2-135m-instruct &
python examples/openai_streaming.py [URL]     # http://127.0.0.1:8000 if not given
"""

import asyncio
import os
import sys
import time

from openai import AsyncOpenAI

QUESTIONS = [f"What is {a} plus {b}?" for a in range(1, 5) for b in range(1, 5)]


async def stream_one(client: AsyncOpenAI, model: str, question: str, show: bool = False) -> tuple[str, int]:
    """The answer to a question and its number of tokens; shown while it comes, if that is wanted."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},  # the last chunk has no choices, but the usage
    )
    text, num_tokens = "", 0
    async for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if show:
                print(choice.delta.content or "", end="", flush=True)
    return text, num_tokens


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PAGEDJAX_API_KEY", "none")) as client:
        model = (await client.models.list()).data[0].id
        start = time.perf_counter()
        _, num_tokens = await stream_one(client, model, "Why is the sky blue?", show=True)
        print(f"\none stream: {num_tokens} tokens, {num_tokens / (time.perf_counter() - start):.1f} tokens/s")

        start = time.perf_counter()
        answers = await asyncio.gather(*(stream_one(client, model, question) for question in QUESTIONS))
        total = sum(num_tokens for _, num_tokens in answers)
        for question, (text, _) in list(zip(QUESTIONS, answers, strict=True))[:3]:
            print(f"{question} {text.strip()!r}")
        seconds = time.perf_counter() - start
        print(f"{len(answers)} streams at a time: {total} tokens, {total / seconds:.1f} tokens/s")

        # To leave a stream ends its request on the server, and frees its blocks.
        stream = await client.completions.create(model=model, prompt="Count: 1, 2, 3,", max_tokens=40, stream=True)
        async for chunk in stream:
            print(f"left after {chunk.choices[0].text!r}")
            break
        await stream.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
