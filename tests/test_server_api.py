"""The real `openai` client against our server: every feature, streaming and not, with what the engine gives offline."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from serving_cases import MODEL_NAME, client_of, events_of, half_characters, serving
from tiny_engine import ascii_tokenizer, greedy, prompt_of, text_of, tiny_llm

from pagedjax.sampling.params import SamplingParams
from pagedjax.serving.server import Server

PROMPT = "hello"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT_TEXT = "u:hello;a:"
HOT = 30.0
"""A temperature at which this model, whose logits are large, is not as good as greedy."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def offline():
    return tiny_llm()


def expected(offline, prompt, **options) -> Any:
    """What `LLM.generate` gives."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})
    return offline.generate(prompt, params, use_tqdm=False)[0]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL_NAME
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="model 'other' is not here"):
        client.completions.create(model="other", prompt="a")


def test_a_completion(client, offline):
    answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=8)
    assert answer.choices[0].text == expected(offline, PROMPT).outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)
    assert len(client.completions.create(model=MODEL_NAME, prompt=PROMPT).choices[0].text) == 16  # OpenAI's default


def test_a_completion_in_a_stream(client, offline):
    stream = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=8, stream=True)
    chunks = list(stream)
    assert len(chunks) > 4
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(offline, PROMPT).outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompts_of_every_form(client, offline):
    """B59: choice index = i * n + j."""
    ids = [ord(char) for char in PROMPT]
    forms = [PROMPT, ids, [PROMPT, "ab"], [ids, [97, 98]]]
    for form in forms:
        answer = client.completions.create(model=MODEL_NAME, prompt=form, temperature=0, max_tokens=4, n=2)
        texts = [expected(offline, text, max_tokens=4).outputs[0].text for text in (PROMPT, "ab")]
        wanted = [text for text in (texts if form in forms[2:] else texts[:1]) for _ in range(2)]
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


def test_a_thousand_prompts(server):
    with client_of(server) as client:
        prompts = [prompt_of(1 + i % 3, seed=i) for i in range(1000)]
        body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(1000))
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    assert answer["usage"]["completion_tokens"] == 1000


def test_a_chat(client, offline):
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=0, max_completion_tokens=8)
    assert answer.choices[0].message.content == expected(offline, CHAT_TEXT).outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")


def test_a_chat_without_a_limit_goes_to_the_end_of_the_context(client):
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage
    assert answer.usage.total_tokens == 64


def test_the_content_of_a_message_may_have_parts(client, offline):
    parts: Any = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages: Any = [{"role": "user", "content": parts, "name": "someone"}]
    answer = client.chat.completions.create(model=MODEL_NAME, messages=messages, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == expected(offline, CHAT_TEXT).outputs[0].text


def test_a_chat_in_a_stream_with_n(client, offline):
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, n=2, seed=5, temperature=HOT, max_tokens=8, stream=True
    )
    texts, roles, ends = ["", ""], [], []
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles += [choice.index] * (choice.delta.role is not None)
        ends += [choice.index] * (choice.finish_reason == "length")
    wanted = expected(offline, CHAT_TEXT, n=2, seed=5, temperature=HOT)
    assert texts == [output.text for output in wanted.outputs]
    assert texts[0] != texts[1]
    assert sorted(roles) == sorted(ends) == [0, 1]


def test_usage_in_a_stream(client):
    """B63: one last chunk without choices, prompt counted once, completions summed; null before."""
    options: Any = {"model": MODEL_NAME, "prompt": PROMPT, "n": 2, "max_tokens": 4, "stream": True}
    for wanted in (None, {}, {"include_usage": False}):
        chunks = list(client.completions.create(**options, stream_options=wanted))
        assert all(chunk.choices for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = client.completions.create(**options, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 8)
    with pytest.raises(openai.BadRequestError, match="stream_options needs stream=true"):
        client.completions.create(model=MODEL_NAME, prompt=PROMPT, stream_options={"include_usage": True})


def test_usage_with_a_stop_string_and_without_tokens(client, offline):
    text = expected(offline, PROMPT).outputs[0].text
    options: Any = {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 0, "stream": True}
    usage: Any = {"include_usage": True}
    *_, last = client.completions.create(**options, max_tokens=8, stop=text[2:4], stream_options=usage)
    assert last.usage.completion_tokens == 4  # what comes after the match is not counted
    chunk, last = client.completions.create(**options, max_tokens=0, stream_options=usage)
    assert (chunk.choices[0].text, chunk.choices[0].finish_reason) == ("", "length")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 0)


def test_stop_strings(client, offline):
    """B39: the stop text is never sent, streamed or not; a list; at the end of the prompt it does not count."""
    text = expected(offline, PROMPT).outputs[0].text
    for stop in (text[3:5], [text[3:5], "no such"], text[3:7]):
        options: Any = {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "stop": stop}
        answer = client.completions.create(**options)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:3], "stop")
        chunks = list(client.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:3]
        assert chunks[-1].choices[0].finish_reason == "stop"
    answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=8, stop=PROMPT[-2:])
    assert answer.choices[0].text == text
    included: Any = {"include_stop_str_in_output": True}
    answer = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=8, stop=text[3:5], extra_body=included
    )
    assert answer.choices[0].text == text[:5]


def test_a_seed_holds_among_neighbours(client, offline):
    options: Any = {"model": MODEL_NAME, "prompt": PROMPT, "temperature": HOT, "max_tokens": 8}
    wanted = expected(offline, PROMPT, temperature=HOT, seed=42).outputs[0].text

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="none") as together:
            seeds = [42, 1, 42, None, 7, 42]
            tasks = [together.completions.create(**options, seed=seed) for seed in seeds]
            return [answer.choices[0].text for answer in await asyncio.gather(*tasks)]

    texts = asyncio.run(many())
    assert [texts[i] for i in (0, 2, 5)] == [wanted] * 3
    assert texts[1] != wanted


def test_logit_bias(client):
    answer = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=3, logit_bias={"65": 100}
    )
    assert answer.choices[0].text == "AAA"


def test_penalties_count_as_in_the_engine(client, offline):
    """B30, over HTTP."""
    options: Any = {"presence_penalty": 2.0, "frequency_penalty": 1.5}
    answer = client.completions.create(
        model=MODEL_NAME,
        prompt=[3, 3, 3, 7],
        temperature=0,
        max_tokens=8,
        extra_body={"repetition_penalty": 1.3},
        **options,
    )
    wanted = expected(offline, [3, 3, 3, 7], repetition_penalty=1.3, **options)
    assert answer.choices[0].text == wanted.outputs[0].text


def test_ends_of_text_and_min_tokens(client, offline):
    """B34, over HTTP."""
    first = expected(offline, PROMPT).outputs[0].token_ids
    for extra in (
        {"stop_token_ids": [first[2]]},
        {"stop_token_ids": [first[2]], "min_tokens": 3},
        {"stop_token_ids": [first[2]], "ignore_eos": True},
    ):
        answer = client.completions.create(
            model=MODEL_NAME, prompt=PROMPT, temperature=0, max_tokens=8, extra_body={**extra, "return_token_ids": True}
        )
        wanted = expected(offline, PROMPT, **extra).outputs[0]
        assert answer.choices[0].token_ids == wanted.token_ids
        assert answer.choices[0].finish_reason == wanted.finish_reason
    with pytest.raises(openai.BadRequestError, match="min_tokens must be at most max_tokens"):
        client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=3, extra_body={"min_tokens": 4})


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_of_completions(client, offline, num_top):
    options: Any = {"model": MODEL_NAME, "prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 6}
    whole = client.completions.create(**options, logprobs=num_top).choices[0]
    wanted = expected(offline, PROMPT, temperature=1.0, seed=3, max_tokens=6, logprobs=num_top).outputs[0]
    assert whole.logprobs.tokens == list(whole.text)
    assert whole.logprobs.text_offset == list(range(6))
    entries = [entry[token_id] for entry, token_id in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    assert whole.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in entries])
    for top, token in zip(whole.logprobs.top_logprobs, whole.logprobs.tokens, strict=True):
        assert token in top
        assert num_top <= len(top) <= num_top + 1
    streamed = [
        chunk.choices[0].logprobs for chunk in client.completions.create(**options, logprobs=num_top, stream=True)
    ]
    assert sum((each.tokens for each in streamed), []) == whole.logprobs.tokens
    assert sum((each.text_offset for each in streamed), []) == whole.logprobs.text_offset
    assert sum((each.top_logprobs for each in streamed), []) == whole.logprobs.top_logprobs


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_logprobs_of_chats(client, num_top):
    options: Any = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 6}
    options |= {"logprobs": True} | ({} if num_top is None else {"top_logprobs": num_top})
    whole = client.chat.completions.create(**options).choices[0]
    entries = whole.logprobs.content
    assert "".join(entry.token for entry in entries) == whole.message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    assert all(len(entry.top_logprobs) == (num_top or 0) for entry in entries)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == entries


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_for_evaluation(client, offline, max_tokens):
    """B60, twice, as the second finds the prompt in the cache."""
    prompt = prompt_of(6)
    scored = expected(offline, prompt, max_tokens=0, prompt_logprobs=1)
    for _ in range(2):
        answer = client.completions.create(
            model=MODEL_NAME, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        (choice,) = answer.choices
        assert choice.text[:6] == text_of(prompt)
        assert choice.finish_reason == "length"
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 6 + max_tokens
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        assert logprobs.text_offset == list(range(6 + max_tokens))
        wanted = [
            entry[token_id].logprob for entry, token_id in zip(scored.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        assert logprobs.token_logprobs[1:6] == pytest.approx(wanted, abs=1e-4)


def test_echo_of_a_batch_in_a_stream_and_without_logprobs(client):
    prompts = [prompt_of(4, seed=i) for i in range(4)]
    options: Any = {"model": MODEL_NAME, "prompt": prompts, "echo": True, "max_tokens": 2, "temperature": 0}
    whole = [choice.text for choice in client.completions.create(**options).choices]
    assert [text[:4] for text in whole] == list(map(text_of, prompts))
    assert all(len(text) == 6 for text in whole)
    streamed = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == whole


def test_characters_over_tokens():
    """B37: tokens that are bytes of characters, good and bad ones, and ends in the middle of one."""
    tokenizer = half_characters()
    with serving(tiny_llm(tokenizer=tokenizer)) as server, client_of(server) as client:
        held_back = 0
        for seed in range(20):
            body: Any = {"prompt": [1, 2, 3], "temperature": HOT, "max_tokens": 3 + seed, "seed": seed, "n": 2}
            body |= {"return_token_ids": True, "logprobs": 1}
            whole = client.post("/v1/completions", json=body).json()["choices"]
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                chunks = [event["choices"][0] for event in events_of(response) if event != "[DONE]"]
            for choice in whole:
                mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
                text = tokenizer.decode(choice["token_ids"], clean_up_tokenization_spaces=False)
                assert "".join(chunk["text"] for chunk in mine) == choice["text"] == text
                assert sum((chunk["token_ids"] for chunk in mine), []) == choice["token_ids"]
                names = sum((chunk["logprobs"]["tokens"] for chunk in mine), [])
                assert names == choice["logprobs"]["tokens"]
                assert len(names) == 3 + seed
                offsets = choice["logprobs"]["text_offset"]
                assert offsets == sorted(offsets)
                assert max(offsets) <= len(text)
                held_back += len(mine) < 3 + seed
        assert held_back > 10
        assert any(name.startswith("bytes:\\x") for name in names)


def test_token_ids_on_request(client, offline):
    answer = client.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=4, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].token_ids == expected(offline, CHAT_TEXT, max_tokens=4).outputs[0].token_ids
    assert answer.choices[0].prompt_token_ids == [ord(char) for char in CHAT_TEXT]


def test_tokenize_and_back(server):
    with client_of(server) as client:
        answer = client.post("/tokenize", json={"prompt": "hello"}).json()
        assert answer == {"count": 5, "max_model_len": 64, "tokens": [104, 101, 108, 108, 111]}
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hello"}
        chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
        assert ascii_tokenizer().decode(chat["tokens"]) == CHAT_TEXT
        assert client.post("/tokenize", json={}).status_code == 400
        assert client.post("/detokenize", json={"tokens": [128]}).status_code == 400


def test_metrics(server, client):
    client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=3, temperature=0)
    with client_of(server) as plain:
        text = plain.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{finished_reason="length"',
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count",
        "pagedjax:num_block_copies_total",
    ):
        assert name in text, name


def test_fork_and_abort_by_id(server):
    with client_of(server) as client:
        body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 1.0, "seed": 1, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as parent:
            lines = parent.iter_lines()
            request_id = next(line for line in lines if line).split('"id":"')[1].split('"')[0]
            forked = client.post(f"/engine/requests/{request_id}/fork", json={"seed": 5})
            rest = "".join(lines)
        if forked.status_code == 200:  # otherwise the parent had ended by then
            assert "[DONE]" in forked.text
            assert request_id not in forked.text
        assert "[DONE]" in rest
        assert client.post(f"/engine/requests/{request_id}/fork").status_code == 404
        assert client.delete(f"/engine/requests/{request_id}").status_code == 404


def test_the_document_describes_every_route(server):
    with client_of(server) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/engine/map"} <= set(paths)
        response: httpx2.Response = client.get("/engine/map")
    picture = response.json()
    assert picture["num_blocks"] == len(picture["blocks"]) == 64
    assert all(len(block) == 4 for block in picture["blocks"])


def test_greedy_is_what_the_client_defaults_do_not_give(client, offline):
    """Temperature 1 unless said otherwise, as OpenAI's."""
    texts = {client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=8).choices[0].text for _ in range(8)}
    assert len(texts) > 1
    assert offline.generate(PROMPT, greedy(8), use_tqdm=False)[0].outputs[0].text
