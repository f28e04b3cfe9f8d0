"""A server of the tiny model on a free port, in this process, and what tests ask of it."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
from tiny_engine import tiny_llm
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from pagedjax.llm import LLM
from pagedjax.serving import pool_view
from pagedjax.serving.app import Limits
from pagedjax.serving.backend import Backend
from pagedjax.serving.server import Server

MODEL_NAME = "tiny"
# On a busy machine a request is over before the pool's picture is due again: here nothing is to be missed.
pool_view.MIN_INTERVAL_S, pool_view.MAX_SHARE = 0.01, 1.0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@contextmanager
def serving(
    llm: LLM | None = None, *, limits: Limits | None = None, chat_template: str | None = CHAT_TEMPLATE, **options: Any
) -> Iterator[Server]:
    """A running server; at the end nothing of its requests may be left in the engine."""
    llm = tiny_llm() if llm is None else llm
    backend = Backend(llm, MODEL_NAME, chat_template=chat_template, **options)
    server = Server(backend, limits or Limits(max_calls=64), port=0)
    server.start()
    try:
        yield server
        if not backend.loop.is_dead:
            wait_until(lambda: backend.loop.num_pending == 0 and not backend.loop.call(_has_unfinished))
            backend.loop.call(assert_nothing_left)
    finally:
        server.stop()


def slow(llm: LLM, seconds: float = 0.02) -> LLM:
    """Every step takes a while: an answer takes seconds, and what happens on the way can be seen."""
    step = llm.engine.step
    llm.engine.step = lambda: (time.sleep(seconds), step())[1]
    return llm


def _has_unfinished(engine: Any) -> bool:
    return engine.has_unfinished()


def assert_nothing_left(engine: Any) -> None:
    """All blocks are free, and nothing of any request is left."""
    engine.scheduler.check_integrity()
    assert engine.scheduler.allocator.num_free_blocks == engine.config.num_blocks
    assert not engine.outputs.groups
    assert not engine.outputs.names
    assert not engine.inboxes


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Waits for something that must happen; the limit is far beyond what it takes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def client_of(server: Server, **options: Any) -> httpx2.Client:
    """A plain HTTP client."""
    return httpx2.Client(base_url=server.url, timeout=60.0, **options)


def events_of(response: httpx2.Response) -> list[Any]:
    """The JSON of a stream's events; "[DONE]" as it is."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def half_characters() -> PreTrainedTokenizerFast:
    """Half of the tokens are single bytes of characters outside ASCII: what is sampled has whole and broken ones."""
    alphabet = {ord(char) for char in ByteLevel.alphabet()}
    others = [byte for byte in range(256) if byte not in alphabet]
    wanted = [*range(32, 96), *(list("🙂é漢ท🏳".encode()) * 4)[:64]]
    vocab: dict[str, int] = {}
    for i, byte in enumerate(wanted):
        name = chr(byte) if byte in alphabet else chr(256 + others.index(byte))
        vocab[name if name not in vocab else f"{name}a{i}"] = i  # a byte that comes again has a letter behind it
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
