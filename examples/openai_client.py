"""The real `openai` client against our server: what changes is the base URL.

pip install 'pagedjax[serve]' openai
pagedjax serve smollm2-135m-instruct &
python examples/openai_client.py [URL]        # http://127.0.0.1:8000 if not given
"""

import os
import sys

from openai import BadRequestError, OpenAI


def main(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PAGEDJAX_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"model: {model}")

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=24,
    )
    print(f"chat: {chat.choices[0].message.content!r}, {chat.choices[0].finish_reason}")
    if chat.usage is not None:
        print(f"usage: {chat.usage.prompt_tokens} prompt and {chat.usage.completion_tokens} completion tokens")

    # Several answers to one prompt share the blocks of its KV; the same seed gives the same answers again.
    for attempt in ("first", "again"):
        several = client.completions.create(model=model, prompt="Once upon a time", n=3, seed=7, max_tokens=10)
        print(f"n=3, seed 7, {attempt}: {[choice.text for choice in several.choices]}")

    stopped = client.completions.create(model=model, prompt="1, 2, 3, 4,", temperature=0, max_tokens=30, stop=[" 7"])
    print(f"stop: {stopped.choices[0].text!r}, {stopped.choices[0].finish_reason}")

    scored = client.completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=1, logprobs=3
    )
    logprobs = scored.choices[0].logprobs
    if logprobs is not None and logprobs.top_logprobs is not None:
        print(f"logprobs: {logprobs.tokens}, {logprobs.top_logprobs[0]}")

    # A bias of -100 forbids a token. Ids come from /tokenize, or here from the answer: return_token_ids is vLLM's.
    ids = {"return_token_ids": True}
    free = client.completions.create(model=model, prompt="The sky is", temperature=0, max_tokens=1, extra_body=ids)
    (token_id,) = (free.choices[0].model_extra or {})["token_ids"]
    biased = client.completions.create(
        model=model, prompt="The sky is", temperature=0, max_tokens=1, logit_bias={str(token_id): -100}
    )
    print(f"logit_bias: {free.choices[0].text!r} becomes {biased.choices[0].text!r}")

    try:
        client.completions.create(model=model, prompt="x", max_tokens=10**6)
    except BadRequestError as error:
        print(f"an error: {error.status_code}, {error.param}: {error.body}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000")
