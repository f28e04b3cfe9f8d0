"""Logits processors: a user's JAX functions inside the sampler, chosen request by request."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def form_of(state: Any) -> Hashable:
    """Structure, shapes and dtypes of a pytree of arrays: those of one form can be stacked."""
    if isinstance(state, Mapping):
        return type(state), tuple((key, form_of(state[key])) for key in sorted(state))
    if isinstance(state, (tuple, list)):
        return type(state), tuple(map(form_of, state))
    if state is None or not hasattr(state, "dtype"):
        return type(state), np.shape(state) if state is not None else ()
    return str(state.dtype), tuple(state.shape)


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """A function of the logits that a request is sampled with.

    `function(logits, state)` gets the logits f32[S, V] of all rows of a step that use it, and returns such an array; it
    is traced by JAX and compiled once per number of rows. Each row of its result must depend on that row alone. S is a
    padded number, 8, 64 or `max_num_seqs`, however few use it: with a second model in it that is what it costs.

    ```
    def cool_down(logits, state):  # a temperature that falls with the length of the output
        return logits * (1 + 0.05 * state["step"][:, None])

    LogitsProcessor(cool_down, state=lambda prompt, output: {"step": np.float32(len(output))})
    ```
    """

    function: Callable[..., Any]
    """The same object for all requests that share it, or each would be compiled by itself."""
    state: Any = None
    """A pytree of arrays for this request, or a function of its prompt and output ids that gives one for each step,
    always of the same shapes. The function is given the states of all rows stacked, [S, ...]."""
    shared: Any = None
    """A pytree that all rows share and that is no part of the program, such as the params of a second model: then the
    call is `function(logits, state, shared)`."""

    def state_for(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Any:
        """This request's state for the next token."""
        return self.state(prompt_ids, output_ids) if callable(self.state) else self.state
