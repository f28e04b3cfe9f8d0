"""Prompts of a wanted number of tokens that have nothing in common, for a server whose tokenizer may be unknown.

Token ids give the exact number. Completions take them; which ids there are says the size of the vocabulary, or else
the server's /tokenize (ours and vLLM's), by the ids of some words. A chat takes text alone: random words, whose tokens
are reckoned from two trial requests. The tokens that are reported are always those that the server counted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx2
import numpy as np

from pagedjax.serving.bench.client import Client, Outcome, Planned, Prompt

KINDS = ("auto", "ids", "text")
TRIAL_WORDS = (4, 68)
_MOST_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face level office "
    "door health person art war history party result change morning reason research girl guy moment air teacher "
    "force education"
)
WORDS = _MOST_COMMON.split()
"""Nouns of one token to most tokenizers."""


class IdPrompts(NamedTuple):
    """Token ids at random."""

    source: str
    token_ids: Sequence[int]

    def make(self, num_tokens: int, rng: np.random.Generator) -> Prompt:
        """Exactly so many ids."""
        return [self.token_ids[i] for i in rng.integers(0, len(self.token_ids), num_tokens)]


class WordPrompts(NamedTuple):
    """Words at random."""

    source: str
    tokens_per_word: float
    num_extra: float
    """Tokens of a prompt without words: a beginning of sequence, a chat template."""

    def make(self, num_tokens: int, rng: np.random.Generator) -> Prompt:
        """About so many tokens, at least one word."""
        num_words = max(round((num_tokens - self.num_extra) / self.tokens_per_word), 1)
        return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), num_words))


Maker = IdPrompts | WordPrompts


async def find_maker(client: Client, kind: str = "auto", vocab_size: int | None = None) -> Maker:
    """The best maker for a server, after at least one trial request that shows that it answers.

    Raises ValueError for what cannot be, and RuntimeError with what the server said if it refuses the trial.
    """
    if kind not in KINDS:
        raise ValueError(f"prompts must be one of {', '.join(KINDS)}, got {kind!r}")
    if client.endpoint == "chat" and (kind == "ids" or vocab_size is not None):
        raise ValueError("prompts: a chat takes text, token ids need endpoint='completions'")
    if client.endpoint == "completions" and kind != "text":
        maker = await _id_maker(client, vocab_size)
        if maker is not None and (kind == "ids" or vocab_size or await _takes(client, maker)):
            await _try(client, maker.make(4, np.random.default_rng(0)))
            return maker
        if kind == "ids":
            raise ValueError("prompts='ids' needs vocab_size: the server has no /tokenize that says what ids there are")
    return await _word_maker(client)


async def _id_maker(client: Client, vocab_size: int | None) -> IdPrompts | None:
    if vocab_size is not None:
        return IdPrompts(f"random token ids below {vocab_size}", range(vocab_size))
    body = {"model": client.model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    try:
        response = await client.http.post("/tokenize", json=body)
        token_ids: Any = response.json()["tokens"] if response.status_code == 200 else None
    except (httpx2.HTTPError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(token_ids, list) or not all(isinstance(i, int) for i in token_ids) or len(token_ids) < 8:
        return None
    distinct = sorted(set(token_ids))
    return IdPrompts(f"token ids at random, of {len(distinct)} that the server's /tokenize gives for words", distinct)


async def _takes(client: Client, maker: IdPrompts) -> bool:
    outcome = await client.send(
        Planned(arrival_s=0.0, prompt=maker.make(4, np.random.default_rng(0)), num_output_tokens=1)
    )
    return outcome.error is None or outcome.error not in ("HTTP 400", "HTTP 422")


async def _word_maker(client: Client) -> WordPrompts:
    rng = np.random.default_rng(0)
    few, many = [(await _try(client, WordPrompts("", 1.0, 0.0).make(n, rng))).num_prompt_tokens for n in TRIAL_WORDS]
    if not 0 < few < many:
        return WordPrompts("random words, each taken for a token as the server reports no usage", 1.0, 0.0)
    per_word = (many - few) / (TRIAL_WORDS[1] - TRIAL_WORDS[0])
    extra = few - per_word * TRIAL_WORDS[0]
    return WordPrompts(f"random words of {per_word:.2f} tokens after {extra:.0f} of the template", per_word, extra)


async def _try(client: Client, prompt: Prompt) -> Outcome:
    outcome = await client.send(Planned(arrival_s=0.0, prompt=prompt, num_output_tokens=2))
    if outcome.error is not None:
        raise RuntimeError(f"the server refused a trial request: {outcome.error}: {outcome.detail}")
    return outcome
