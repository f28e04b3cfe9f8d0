"""From what a user asks for to sequences that can be scheduled: prompts and params checked, limits and seeds set."""

import random
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import jax
import numpy as np

from pagedjax.beams.params import BeamSearchParams
from pagedjax.beams.search import BeamSearch
from pagedjax.sampling.checks import check_vocabulary
from pagedjax.sampling.edits import tokenize_bad_words
from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.pipeline import check_processors
from pagedjax.scheduling.group import SequenceGroup
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.sequences import Sequence as HeldSequence

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Mapping[str, Any] | HeldSequence
"""Text, token ids, a mapping with one of the keys "prompt" and "prompt_token_ids", or a handle on KV in the pool."""

Params = SamplingParams | BeamSearchParams


class RequestFactory:
    """Makes the requests of one engine. Everything that is wrong with one is a ValueError that names the field."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Sequence[int], seed: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._arrivals = count()
        self._seeds = random.Random(seed)

    def tokenize(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A `Prompt`'s text, if it has one, and its token ids. Raises ValueError that says what is wrong with it."""
        if isinstance(prompt, HeldSequence):
            return None, prompt.token_ids
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValueError(
                    f'prompt must have the key "prompt" or "prompt_token_ids" alone, got {sorted(map(str, keys))}'
                )
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is text, but this model has no tokenizer: pass token ids")
            try:
                token_ids = self.tokenizer(prompt)["input_ids"]
            except TypeError as error:  # what tokenizers raises for a lone surrogate
                raise ValueError(f"prompt cannot be tokenized: {error}") from error
            return prompt, checked_token_ids(token_ids, self.vocab_size)
        return None, checked_token_ids(prompt, self.vocab_size)

    def checked_ids(self, token_ids: Any) -> list[int]:
        """Token ids as a list of ints; ValueError for anything else, and for those beyond the vocabulary."""
        return checked_token_ids(token_ids, self.vocab_size, "token_ids")

    def new_group(
        self, request_id: str, token_ids: list[int], params: Params, max_seq_len: int, rank: float
    ) -> SequenceGroup:
        """The sequences that a request of checked tokens starts with; none may have more than `max_seq_len` tokens.
        They stand in line behind all of a lower or equal `rank`."""
        if not isinstance(params, Params):
            raise ValueError(f"params must be SamplingParams or BeamSearchParams, got {type(params).__name__}")
        limit = max_seq_len
        if params.max_tokens is not None:
            limit = min(limit, len(token_ids) + int(params.max_tokens))
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        search = None
        if isinstance(params, BeamSearchParams):
            search = BeamSearch(params, eos_token_ids, max_tokens=max(1, limit - len(token_ids)))
            params = params.sampling_params()
        self._check_params(params)
        check_processors(params.logits_processors, token_ids, self.vocab_size)
        bad_word_ids = tokenize_bad_words(params.bad_words, self.tokenizer, self.vocab_size)
        seed = self._seeds.getrandbits(64) if params.seed is None else int(params.seed)
        requests = [
            Request(
                request_id=child_id(request_id, i, params.n),
                prompt_token_ids=token_ids,
                params=params,
                arrival=(rank, next(self._arrivals)),
                max_num_tokens=limit,
                seed=seed,
                sample_index=i,
                eos_token_ids=eos_token_ids,
                stop_token_ids=frozenset(params.stop_token_ids),
                ignored_eos_token_ids=self._eos_token_ids if params.ignore_eos else frozenset(),
                bad_word_ids=bad_word_ids,
                num_known_prompt_logprobs=min(int(params.prompt_logprobs_start), len(token_ids)),
            )
            for i in range(params.n)
        ]
        return SequenceGroup(requests, search)

    def _check_params(self, params: SamplingParams) -> None:
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
        if self.tokenizer is None and any(isinstance(word, str) for word in params.bad_words):
            raise ValueError("bad_words as text need a tokenizer, and this model has none: use lists of token ids")
        check_vocabulary(params, self.vocab_size)


def child_id(request_id: str, index: int, n: int) -> str:
    """The name of one of a request's n sequences."""
    return request_id if n == 1 else f"{request_id}[{index}]"


def checked_token_ids(prompt: Any, vocab_size: int, name: str = "prompt") -> list[int]:
    """Token ids as a list of ints; ValueError for anything else. On the device a bad id would read another row."""
    label = "prompt token ids" if name == "prompt" else name
    if hasattr(prompt, "__array__"):
        prompt = np.asarray(prompt)  # a jax array, on the host
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (Sequence, np.ndarray)):
        expected = "text, token ids or a mapping" if name == "prompt" else "a list of ints"
        raise ValueError(f"{name} must be {expected}, got {type(prompt).__name__}")
    is_flat = not isinstance(prompt, np.ndarray) or prompt.ndim == 1
    if not is_flat or not all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in prompt):
        raise ValueError(f"{label} must be a flat list of ints, got {prompt!r:.80}")
    if not len(prompt):
        raise ValueError(f"{name} is empty: it needs at least one token")
    ids = np.asarray(prompt)
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"{label} must be in [0, {vocab_size}), the vocabulary, got {bad}")
    return ids.tolist()
