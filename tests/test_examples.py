"""The programs in examples/ run, and what they show is so."""

import asyncio
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import jax
import numpy as np
import optax
import pytest
from serving_cases import serving
from test_docs import blocks_of
from tiny_engine import MODEL, tiny_llm, tiny_params

from pagedjax import functional
from pagedjax.serving.app import Limits

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_quickstart_is_the_readmes():
    """`test_docs` runs it."""
    assert blocks_of("README.md")[0] in (EXAMPLES / "quickstart.py").read_text()


@pytest.mark.slow
def test_logits_processors():
    program = [sys.executable, str(EXAMPLES / "logits_processors.py")]
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    texts = re.findall(r"--- (\w+)\n(.{50,}?)\n\n(?=---|cooled:)", run.stdout, re.DOTALL)
    assert [name for name, _ in texts] == ["unmarked", "marked", "cooled", "greedy", "contrastive"]
    assert len({text for _, text in texts}) == 5
    first, last, marked, unmarked = map(float, re.findall(r" (-?\d+\.\d)", run.stdout[run.stdout.rindex("cooled:") :]))
    assert first > last
    assert marked > 4
    assert abs(unmarked) < 3


def run_example(name: str, *arguments: str, status: int = 0, **environment: str) -> str:
    """What an example prints, both streams."""
    program = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    run = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **environment})
    assert run.returncode == status, run.stderr
    return run.stdout + run.stderr


def test_the_openai_client():
    with serving() as server:
        shown = run_example("openai_client.py", server.url)
    assert "model: tiny\n" in shown
    assert re.search(r"^usage: \d\d prompt and 24 completion tokens$", shown, re.MULTILINE)
    first, again = re.findall(r"^n=3, seed 7, \w+: (.*)$", shown, re.MULTILINE)
    assert first == again
    free, biased = re.findall(r"^logit_bias: (.*) becomes (.*)$", shown, re.MULTILINE)[0]
    assert free != biased
    assert re.search(r"^logprobs: \['.+'\], \{(.+: -?[\d.e-]+(, )?){3,4}\}$", shown, re.MULTILINE)
    assert re.search(r"^an error: 400, max_tokens: ", shown, re.MULTILINE)


def test_streaming_with_the_openai_client():
    with serving(limits=Limits(max_calls=64, api_key="s3cret")) as server:
        shown = run_example("openai_streaming.py", server.url, PAGEDJAX_API_KEY="s3cret")
    assert re.search(r"^one stream: 24 tokens, ", shown, re.MULTILINE)
    assert re.search(r"^16 streams at a time: 384 tokens, ", shown, re.MULTILINE)
    assert "left after " in shown


def batch_request(name: str, body: Any, url: str = "/v1/completions") -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_a_batch_file(tmp_path):
    """More requests than the server takes at once: those that are refused come again."""
    lines = [batch_request(f"text {i}", {"prompt": f"{i}", "max_tokens": 3 + i}) for i in range(10)]
    lines.append(batch_request("chat", {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"))
    lines.append(batch_request("bad", {"prompt": "x", "max_tokens": "many"}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n\n")
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    with serving(limits=Limits(max_calls=3)) as server:
        shown = run_example("batch_file.py", *files, "--url", server.url, status=1)
    assert "11 of 12 requests succeeded" in shown
    answers = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert len(answers) == 12
    statuses = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert statuses.pop("bad") == 400
    assert set(statuses.values()) == {200}
    assert answers["text 4"]["response"]["body"]["usage"]["completion_tokens"] == 7
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert all(answer["error"] is None and answer["id"].startswith("batch_req_") for answer in answers.values())


BAD_LINES = {
    "{": "line 1 is not a request: JSONDecodeError",
    "[]": "line 1 is not a request: TypeError",
    '{"custom_id": "a"}': "KeyError: 'method'",
    batch_request("a", {"stream": True}): "line 1: expected a custom_id and a POST",
    batch_request("a", {}, "http://elsewhere"): "line 1: expected a custom_id and a POST",
    batch_request("a", {}) + "\n" + batch_request("a", {}): "line 2: custom_id 'a' stands there twice",
}


@pytest.mark.parametrize(("text", "message"), BAD_LINES.items(), ids=map(str, range(len(BAD_LINES))))
def test_a_batch_file_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        batch_file().read_requests(io.StringIO(text))


def batch_file() -> Any:
    return example_module("batch_file")


def example_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_batch_waits_as_long_as_it_is_told(ends_well, monkeypatch):
    """Retry-After where the server says it, else twice as long each time; a lost connection is tried again too."""
    answers = [httpx2.Response(429, headers={"Retry-After": "3"}), httpx2.ConnectError("gone"), httpx2.Response(503)]
    answers += [httpx2.Response(200, json={})] if ends_well else [httpx2.ReadError("lost")] * 5
    waits: list[float] = []

    def reply(request: Any) -> httpx2.Response:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    module = batch_file()
    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    request = json.loads(batch_request("a", {}))

    async def run() -> Any:
        async with httpx2.AsyncClient(base_url="http://server.test", transport=httpx2.MockTransport(reply)) as http:
            return await module.answer(http, request)

    line = asyncio.run(run())
    assert line["custom_id"] == "a"
    if ends_well:
        assert waits == [3.0, 2.0, 4.0]
        assert line["response"]["status_code"] == 200
        assert line["error"] is None
    else:
        assert waits == [3.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
        assert line["response"] is None
        assert line["error"] == {"code": "connection_error", "message": "ReadError: lost"}


def test_a_tree_search_gives_all_blocks_back(capsys):
    """Branches share their beginning: nothing of the question is computed twice."""
    tree_search = example_module("tree_search")
    llm = tiny_llm(max_model_len=192, num_blocks=256, block_size=4)
    text, value = tree_search.search(llm, width=2, num_samples=3)
    assert text.startswith(tree_search.QUESTION)
    assert text.count("\n") >= 1
    assert value < 0
    assert llm.stats().num_free_blocks == 256
    assert llm.stats().num_block_copies > 0
    assert "point 3: 6 candidates" in capsys.readouterr().out
    again = tree_search.search(llm, width=1, num_samples=1)
    assert again[1] <= value  # the wider search found nothing worse


def test_a_step_of_grpo():
    """The trainer's log-probabilities are the sampler's, better answers get likelier, the engine has the weights."""
    grpo = example_module("grpo_smollm2")
    llm, sums = tiny_llm(), [(2, 3), (4, 5)]
    assert [grpo.reward((2, 3), text) for text in (" 5", "5\n", "6", "5 6", "")] == [1, 1, 0, 0, 0]
    batch, rewards, num_tokens = grpo.sample(llm, sums, seed=3)
    assert rewards.shape == (2, grpo.NUM_SAMPLES)
    assert num_tokens == batch["mask"].sum() > 0
    assert (batch["token_ids"][0, :22] == [ord(char) for char in "2+5=7\n4+3=7\n6+2=8\n2+3="]).all()
    batch["advantages"] = np.where(np.arange(16) % 2 == 0, 1, -1).astype(np.float32)
    params, optimizer = tiny_params(), optax.sgd(1e-6)
    train_step = grpo.make_train_step(MODEL, optimizer)
    updated, _, gap = train_step(params, optimizer.init(params), batch)
    assert gap < 5e-4  # of logits up to 100, see LOGIT_TOLERANCE
    scores = functional.score(MODEL, params, batch["token_ids"], batch["lens"])
    better = functional.score(MODEL, updated, batch["token_ids"], batch["lens"])
    gain = ((better - scores) * batch["mask"]).sum(axis=1) * batch["advantages"]
    assert gain.sum() > 0
    llm.update_params(updated)
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, llm.engine.runner.params, updated))
