"""Bad requests over HTTP: a clear 400 that names the field, in JSON; nothing reaches the engine, neighbours notice
nothing. The numbers are those of the project's list of cases."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from serving_cases import MODEL_NAME, client_of, serving, wait_until
from tiny_engine import VOCAB_SIZE, fill_pool, prompt_of, tiny_llm

from pagedjax.serving.app import Limits
from pagedjax.serving.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(limits=Limits(max_calls=64, max_body_bytes=1 << 20)) as running:
        yield running


@pytest.fixture
def client(server) -> Iterator[httpx2.Client]:
    with client_of(server) as made:
        before = made.post(COMPLETIONS, json=GOOD).json()["choices"]
        num_finished = server.backend.loop.stats.num_finished
        yield made
        wait_until(lambda: server.backend.loop.num_pending == 0)
        assert made.get("/health").status_code == 200
        assert made.post(COMPLETIONS, json=GOOD).json()["choices"] == before
        assert num_finished  # the engine did see the good ones


def assert_error(response: httpx2.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [b"{bad", b"[]", b"null", b'"x"', b"", b"1", b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000, b'{"prompt": "\\ud800"}'],
    ids=lambda body: body[:12].decode("latin-1"),
)
def test_broken_json(client, path, body):
    """B57."""
    headers = {"Content-Type": "application/json"}
    error = client.post(path, content=body, headers=headers).json()["error"]
    assert_error(client.post(path, content=body, headers=headers), param=error["param"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": 60}, "max_tokens"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": 5000}, "n"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"priority": 1}, "priority"),
        # B31: ids that are not in the vocabulary, and what is no bias.
        ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 100}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE + 3]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bad_fields(client, path, fields, param):
    """B57, B65, B31."""
    good = GOOD if path == COMPLETIONS else {"messages": USER, "max_tokens": 4}
    assert_error(client.post(path, json={**good, **fields}), param=param)


@pytest.mark.parametrize(
    "prompt",
    [
        *(
            [1, "a"],
            [True],
            [1.0],
            [-1],
            [VOCAB_SIZE],
            [4294967295],
            [2**70],
            [[1], []],
            [],
            [[]],
            ["a", 1],
            {},
            None,
            5,
        ),
        *(["a"] * 2049, [1] * 64, [[1], [2], [VOCAB_SIZE]]),
    ],
    ids=lambda prompt: str(prompt)[:30],
)
def test_bad_prompts(client, server, prompt):
    """B59: one bad id refuses the whole call, and none of it is left running. B69: no id is wrapped or clamped."""
    num_finished = server.backend.loop.stats.num_finished
    assert_error(client.post(COMPLETIONS, json={**GOOD, "prompt": prompt}), param="prompt")
    assert server.backend.loop.num_pending == 0
    assert server.backend.loop.stats.num_finished == num_finished


def test_a_missing_prompt(client):
    assert_error(client.post(COMPLETIONS, json={"max_tokens": 3}), param="prompt")
    assert_error(client.post(CHAT, json={"max_tokens": 3}), param="messages")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", -1, "invalid_value"),
        ("temperature", "hot", "invalid_type"),
        ("seed", 1.5, "invalid_type"),
        ("seed", 2**64, "invalid_value"),
        ("top_k", [1], "invalid_type"),
        ("service_tier", "flex", "invalid_value"),
        ("allowed_token_ids", [], "invalid_value"),
        ("tools", [], "unknown_field"),
    ],
)
def test_the_code_says_what_is_wrong_with_a_field(client, field, value, code):
    assert assert_error(client.post(COMPLETIONS, json={**GOOD, field: value}), param=field)["code"] == code


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([None], "messages[0]"),
        ({}, "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "x" * 80}], "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_messages(client, messages, param):
    assert_error(client.post(CHAT, json={"messages": messages}), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"tools": []}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_bad_fields_of_chats(client, fields, param):
    assert_error(client.post(CHAT, json={"messages": USER, **fields}), param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": 21}, "logprobs"), ({"echo": 1}, "echo")],
    ids=str,
)
def test_bad_fields_of_completions(client, fields, param):
    assert_error(client.post(COMPLETIONS, json={**GOOD, **fields}), param=param)


def test_null_is_the_default(client):
    nulls = dict.fromkeys(("n", "stop", "logprobs", "echo", "seed", "stream", "stream_options", "logit_bias", "user"))
    assert client.post(COMPLETIONS, json={**GOOD, **nulls}).status_code == 200


def test_string_keys_of_a_bias_and_two_max_tokens_that_agree(client):
    assert client.post(COMPLETIONS, json={**GOOD, "logit_bias": {"12": 3}}).status_code == 200
    both = {"messages": USER, "max_tokens": 4, "max_completion_tokens": 4}
    assert client.post(CHAT, json=both).status_code == 200


def test_the_end_of_the_context(client):
    """B65, B69: up to the last position, and not beyond it."""
    for num_prompt in (1, 59, 63):
        answer = client.post(COMPLETIONS, json={"prompt": prompt_of(num_prompt), "max_tokens": 64 - num_prompt})
        assert answer.status_code == 200
    error = assert_error(client.post(COMPLETIONS, json={"prompt": prompt_of(60), "max_tokens": 5}), param="max_tokens")
    assert error["message"] == "max_tokens: 5 tokens after a prompt of 60 are more than the context of 64"
    assert error["code"] == "context_length_exceeded"
    assert client.post(COMPLETIONS, json={"prompt": prompt_of(64), "max_tokens": 0, "echo": True}).status_code == 200


def test_other_content_types(client):
    body = json.dumps(GOOD).encode()
    for content_type in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if content_type is None else {"Content-Type": content_type}
        assert_error(client.post(COMPLETIONS, content=body, headers=headers))
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post(COMPLETIONS, content=body, headers=headers).status_code == 200


def test_a_body_that_is_too_large(client):
    error = assert_error(client.post(COMPLETIONS, json={"prompt": "x" * (1 << 20)}), 413)
    assert "1048576 bytes" in error["message"]


def test_other_methods_and_paths(client):
    response = client.get(COMPLETIONS)
    assert_error(response, 405)
    assert "POST" in response.headers["Allow"]
    assert_error(client.post("/v1/models"), 405)
    assert_error(client.get("/v1/nothing"), 404)
    assert_error(client.get("/web/../app.py"), 404)
    assert_error(client.post("/engine/requests/none/fork"), 404)
    assert_error(client.delete("/engine/requests/none"), 404)


def test_equal_request_ids_of_clients(client):
    """B22: they are not ours."""
    headers = {"X-Request-Id": "same"}
    ids = [client.post(COMPLETIONS, json=GOOD, headers=headers).json()["id"] for _ in range(2)]
    assert len(set(ids)) == 2


def test_no_cors_by_default(client):
    response = client.post(COMPLETIONS, json=GOOD, headers={"Origin": "http://evil.example"})
    assert "Access-Control-Allow-Origin" not in response.headers


def test_a_pool_full_of_nan_changes_nothing(server, client):
    expected = client.post(COMPLETIONS, json={"prompt": prompt_of(9), "max_tokens": 20, "temperature": 0}).json()
    llm = tiny_llm(enable_prefix_caching=False)
    fill_pool(llm.engine, float("nan"))
    with serving(llm) as other, client_of(other) as second:
        answer = second.post(COMPLETIONS, json={"prompt": prompt_of(9), "max_tokens": 20, "temperature": 0}).json()
    assert answer["choices"] == expected["choices"]


def test_an_api_key():
    limits = Limits(api_key="sécret", cors_origins=("http://page.example",))
    with serving(limits=limits) as server, client_of(server) as client:
        wrong: list[Any] = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sécret".encode()}]
        for headers in wrong:
            for path in ("/v1/models", "/metrics", "/engine/map", "/nothing"):
                assert_error(client.get(path, headers=headers), 401)
            assert_error(client.post(COMPLETIONS, json=GOOD, headers=headers), 401)
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        headers = {"Authorization": "Bearer sécret".encode(), "Origin": "http://page.example"}
        response = client.post(COMPLETIONS, json=GOOD, headers=headers)
        assert response.status_code == 200
        assert response.headers["Access-Control-Allow-Origin"] == "http://page.example"


def test_chat_templates():
    """B56: none, one that refuses, and exactly one beginning of text."""
    with serving(chat_template=None) as server, client_of(server) as client:
        error = assert_error(client.post(CHAT, json={"messages": USER}), param="messages")
        assert "chat template" in error["message"]
        assert client.post(COMPLETIONS, json=GOOD).status_code == 200
    refusing = (
        "{{ raise_exception('Only user and assistant roles') if messages[0].role != 'user' }}{{ messages[0].content }}"
    )
    with serving(chat_template=refusing) as server, client_of(server) as client:
        error = assert_error(client.post(CHAT, json={"messages": [{"role": "tool", "content": "x"}]}), param="messages")
        assert "Only user and assistant roles" in error["message"]
        assert client.post(CHAT, json={"messages": USER, "max_tokens": 2}).status_code == 200


def test_a_model_without_a_tokenizer():
    with serving(tiny_llm(tokenizer=None)) as server, client_of(server) as client:
        answer = client.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True})
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
        for body in (
            {"prompt": "text"},
            {"prompt": [1], "stop": "x"},
            {"prompt": [1], "logprobs": 1},
            {"prompt": [1], "echo": True},
        ):
            assert client.post(COMPLETIONS, json=body).status_code == 400
        assert client.post(CHAT, json={"messages": USER}).status_code == 400
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL_NAME


@pytest.mark.parametrize("name", ["messages", "tokenizer", "self", "conversation", "tokenize", "padding", "tools"])
def test_template_options_that_are_not_the_templates(client, name):
    error = client.post(CHAT, json={"messages": USER, "chat_template_kwargs": {name: 1}})
    assert name in assert_error(error, 400, "chat_template_kwargs")["message"]
    fine = client.post(
        CHAT, json={"messages": USER, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert fine.status_code == 200


def test_what_is_wrong_is_not_sent_back_whole(client):
    for body in ({**GOOD, "logit_bias": {"9" * 100_000: 1}}, {**GOOD, "x" * 100_000: 1}):
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 400
        assert len(answer.content) < 3000


def test_words_are_not_more_than_the_engine_may_look_at(client):
    assert_error(client.post(COMPLETIONS, json={**GOOD, "bad_words": ["a"] * 1025}), 400, "bad_words")
    assert_error(client.post(COMPLETIONS, json={**GOOD, "stop": ["a"] * 1025}), 400, "stop")
    assert_error(client.post(COMPLETIONS, json={**GOOD, "stop": ["a" * 1001]}), 400, "stop[0]")
    assert client.post(COMPLETIONS, json={**GOOD, "bad_words": ["a"] * 1024}).status_code == 200


@pytest.mark.parametrize("path", ["/web//etc/passwd", "/web/../app.py", "/web/%2e%2e/app.py", "//v1/models", "/web"])
def test_no_other_file_is_had(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert response.headers["Content-Type"] == "application/json"


def test_a_conversation_without_tokens():
    with serving(chat_template="{{ messages[0]['content'] }}") as server, client_of(server) as client:
        empty = {"messages": [{"role": "user", "content": ""}]}
        assert_error(client.post(CHAT, json=empty), 400, "messages")
