"""What can be said of arguments while a program is traced: ValueError that names the field, got and expected."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pagedjax.functional.layout import Layout
from pagedjax.models.config import ModelConfig
from pagedjax.sampling.checks import check_int


def count(name: str, value: Any) -> int:
    """An int of at least 1. It decides shapes, so it cannot be traced."""
    check_int(name, value, 1)
    return int(value)


def flag(name: str, value: Any) -> bool:
    """A bool of Python or numpy. It decides what the program is, so it cannot be traced."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}: expected True or False, known while the program is traced, got {value!r}")
    return bool(value)


def batch_invariant(value: Any) -> bool:
    """A bool, and True on a CPU alone."""
    value = flag("batch_invariant", value)
    if value and jax.default_backend() != "cpu":
        raise ValueError("batch_invariant: expected False on a GPU, where it is not known how to have it")
    return value


def positions(config: ModelConfig, prompt_len: int, max_new_tokens: int) -> None:
    """The last new token is sampled at a position, but never goes through the model."""
    needed, longest = prompt_len + max_new_tokens - 1, config.max_position_embeddings
    if needed > longest:
        raise ValueError(
            f"max_new_tokens: prompts of {prompt_len} tokens and {max_new_tokens} new ones take {needed} positions, "
            f"expected at most the model's {longest}"
        )


def integers(name: str, value: Any, ndim: int) -> None:
    """An array of ints with this many axes, none of them empty."""
    shape, dtype = np.shape(value), getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or len(shape) != ndim or 0 in shape:
        raise ValueError(f"{name}: expected an array of ints with {ndim} non-empty axes, got {dtype}{list(shape)}")


def prompts(
    prompt_ids: Any,
    prompt_lens: Any,
    layout: Layout | None = None,
    names: tuple[str, str] = ("prompt_ids", "prompt_lens"),
) -> None:
    """Token ids [B, T], and lengths [B] in 1 to T as far as they are known."""
    ids_name, lens_name = names
    integers(ids_name, prompt_ids, 2)
    shape = np.shape(prompt_ids)
    if layout is not None and shape != (layout.num_prompts, layout.prompt_len):
        raise ValueError(f"{ids_name}: expected {[layout.num_prompts, layout.prompt_len]} as the cache, got {[*shape]}")
    if prompt_lens is None:
        return
    integers(lens_name, prompt_lens, 1)
    if np.shape(prompt_lens) != shape[:1]:
        raise ValueError(f"{lens_name}: expected one for each of {shape[0]} rows, got shape {np.shape(prompt_lens)}")
    if layout is not None and layout.exact_lens:
        raise ValueError(f"{lens_name}: expected None for a cache with exact_lens")
    if not isinstance(prompt_lens, Tracer):
        lens = np.asarray(prompt_lens)
        if lens.min() < 1 or lens.max() > shape[1]:
            raise ValueError(f"{lens_name}: expected 1 to {shape[1]}, got {lens.tolist()}")


def per_prompt(name: str, value: Any, num_prompts: int, low: float, high: float) -> None:
    """A number, or one for each prompt; if it is known, in [low, high]."""
    if np.shape(value) not in ((), (num_prompts,)):
        raise ValueError(f"{name}: expected a number or one for each of {num_prompts} prompts, got {np.shape(value)}")
    if isinstance(value, Tracer):
        return
    numbers = np.asarray(value)
    is_number = jnp.issubdtype(numbers.dtype, jnp.floating) or jnp.issubdtype(numbers.dtype, jnp.integer)
    if not is_number or not np.all((numbers >= low) & (numbers <= high)):
        raise ValueError(f"{name}: expected numbers in [{low}, {high}], got {value!r}")


def token_ids(name: str, value: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Token ids that are part of the program."""
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        raise ValueError(f"{name}: expected a sequence of token ids, got {value!r}")
    for token_id in value:
        check_int(name, token_id, 0, vocab_size - 1)
    return tuple(map(int, value))


def processors(value: Any) -> tuple[Callable[..., Any], ...]:
    """Functions of logits and `Generated`."""
    if not isinstance(value, Sequence) or not all(map(callable, value)):
        raise ValueError(f"logits_processors: expected a sequence of functions, got {value!r}")
    return tuple(value)
