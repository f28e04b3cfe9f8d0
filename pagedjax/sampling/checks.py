"""Checks of single options: ValueError that names the field, what it got and what it expects. Host only."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral, Real
from typing import Any

from pagedjax.sampling.processors import LogitsProcessor

MAX_INT = 2**31 - 1
MAX_BIAS = 100.0


def check_int(name: str, value: Any, low: int, high: int = MAX_INT) -> None:
    """A bool is no int."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")


def check_float(name: str, value: Any, low: float, high: float) -> None:
    """Neither NaN nor infinite, nor a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number in [{low}, {high}], got {value!r}")
    # In numpy's float16 the limits themselves may be infinite; an int may be too large for a float.
    number = value if isinstance(value, int) else float(value)
    if not low <= number <= high:  # false for NaN
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value!r}")


def check_bool(name: str, value: object) -> None:
    """Nothing that is merely true or false enough."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")


def check_stop(stop: Any) -> None:
    """A string or a list of them, none empty."""
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop must be a non-empty string or a list of them, got {stop!r}")


def check_token_ids(name: str, token_ids: Any, *, may_be_empty: bool = True) -> None:
    """A list of ints from 0 on; the vocabulary's end is not known here."""
    is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes, bytearray))
    if not is_list or not (may_be_empty or len(token_ids)):
        raise ValueError(f"{name} must be a {'' if may_be_empty else 'non-empty '}list of ints, got {token_ids!r}")
    for token_id in token_ids:
        check_int(name, token_id, 0)


def checked_logit_bias(bias: Any) -> dict[int, float]:
    """`logit_bias` with int keys: JSON has only strings for them."""
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must be a mapping from token ids to numbers, got {bias!r}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        # At most the digits of MAX_INT: Python refuses to read thousands of them, in other words than ours.
        is_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(MAX_INT))
        token_id: Any = int(key) if is_digits else key
        check_int("logit_bias keys", token_id, 0)
        check_float(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
        if int(token_id) in checked:
            raise ValueError(f"logit_bias must have each token id once, got {token_id} twice")
        checked[int(token_id)] = float(value)
    return checked


def check_bad_words(words: Any) -> None:
    """A list whose elements are text or lists of token ids, none empty."""
    if not isinstance(words, Sequence) or isinstance(words, (str, bytes, bytearray)):
        raise ValueError(f"bad_words must be a list of strings or of lists of token ids, got {words!r}")
    for word in words:
        if not isinstance(word, str):
            check_token_ids("bad_words", word, may_be_empty=False)
        elif not word:
            raise ValueError(f"bad_words must not be empty, got {word!r}")


def check_logits_processors(processors: Any) -> None:
    """A list of LogitsProcessor."""
    is_list = isinstance(processors, Sequence)
    if not is_list or not all(isinstance(processor, LogitsProcessor) for processor in processors):
        raise ValueError(f"logits_processors must be a list of LogitsProcessor, got {processors!r}")


def check_vocabulary(params: Any, vocab_size: int) -> None:
    """What a SamplingParams can only be asked when the model is known: on the device a bad id is another's logit."""
    ids_of: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": chain.from_iterable(word for word in params.bad_words if not isinstance(word, str)),
    }
    for name, token_ids in ids_of.items():
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise ValueError(f"{name} must be below the vocabulary size {vocab_size}, got {token_id}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > vocab_size:
            raise ValueError(f"{name} must be at most the vocabulary size {vocab_size}, got {value}")
