"""Users' own functions in the sampler: JAX functions of the logits, chosen by request, and what they may not break."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import VOCAB_SIZE, assert_greedy, dense_logits, greedy, naive_greedy, prompt_of, run_all, tiny_engine

from pagedjax.sampling.params import SamplingParams
from pagedjax.sampling.processors import LogitsProcessor

PROMPT = prompt_of(9)


def only_even(logits, state):
    return jnp.where(jnp.arange(VOCAB_SIZE)[None, :] % 2 == 0, logits, -jnp.inf)


def prefer(logits, state):
    return logits + 1e4 * jax.nn.one_hot(state["token"], VOCAB_SIZE)


def minus_shared(logits, state, shared):
    return logits - shared[None, :]


EVEN = LogitsProcessor(only_even)


def ids_of(*requests: tuple[list[int], SamplingParams], **options) -> list[list[int]]:
    engine = tiny_engine(**options)
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(prompt, params, str(i))
    finished = run_all(engine)
    return [finished[str(i)].outputs[0].token_ids for i in range(len(requests))]


def test_a_request_with_one_next_to_one_without():
    with_one, without = ids_of((PROMPT, greedy(8, logits_processors=[EVEN])), (prompt_of(5, 1), greedy(8)))
    assert all(token % 2 == 0 for token in with_one)
    assert_greedy(prompt_of(5, 1), without)
    rows = dense_logits([*PROMPT, *with_one])[len(PROMPT) - 1 : -1]
    assert with_one == (2 * rows[:, ::2].argmax(axis=-1)).tolist()


def test_state_follows_the_output():
    """A function of prompt and output gives the state: here it asks for token 10, 11, 12, ..."""
    processor = LogitsProcessor(prefer, state=lambda prompt, output: {"token": np.int32(10 + len(output))})
    outputs = ids_of(*((prompt_of(5 + i, i), greedy(6, logits_processors=[processor])) for i in range(3)))
    assert outputs == [[10, 11, 12, 13, 14, 15]] * 3


def test_each_request_has_its_own_state():
    requests = [
        (prompt_of(5 + i, i), greedy(4, logits_processors=[LogitsProcessor(prefer, state={"token": np.int32(i)})]))
        for i in range(5)
    ]
    assert ids_of(*requests) == [[i] * 4 for i in range(5)]


def test_they_act_in_the_order_of_the_request():
    first, second = (LogitsProcessor(prefer, state={"token": np.int32(i)}) for i in (4, 7))
    chain = [first, EVEN, second]  # 7 is preferred last, after what only_even took away: -inf stays
    assert ids_of((PROMPT, greedy(3, logits_processors=chain))) == [[4] * 3]


def test_shared_arrays_are_no_part_of_the_program():
    shared = jnp.zeros(VOCAB_SIZE).at[np.array(naive_greedy(PROMPT, 1))].set(1e4)
    (token,) = ids_of((PROMPT, greedy(1, logits_processors=[LogitsProcessor(minus_shared, shared=shared)])))[0]
    assert token == dense_logits(PROMPT)[-1].argsort()[-2]


def test_compiled_once_for_a_set_of_functions():
    traces = []

    def counted(logits, state):
        traces.append(logits.shape)
        return logits

    processor = LogitsProcessor(counted)
    requests = [(prompt_of(3 + i, i), greedy(10, logits_processors=[processor])) for i in range(4)]
    ids_of(*requests)
    ids_of(*requests[:2])
    num_traces = len(traces)
    assert 1 <= num_traces <= 2 + len(requests)  # two sizes of rows, and the check when a request is added
    ids_of(*requests)
    assert len(traces) - num_traces <= len(requests)


def test_seeded_draws_stay_the_same_with_any_neighbours():
    params = SamplingParams(temperature=20.0, seed=3, ignore_eos=True, logits_processors=[EVEN], max_tokens=10)
    (alone,) = ids_of((PROMPT, params))
    crowd = [(prompt_of(4 + i, i + 1), greedy(12)) for i in range(4)]
    assert ids_of(*crowd[:2], (PROMPT, params), *crowd[2:])[2] == alone
    assert ids_of((PROMPT, params), max_num_batched_tokens=8)[0] == alone


def bad_shape(logits, state):
    return logits[:, :-1]


def raises(logits, state):
    raise RuntimeError("broken by its author")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bad_shape, r"logits_processors: 'bad_shape' does not work: it must return float32\(1, 128\)"),
        (raises, "logits_processors: 'raises' does not work: broken by its author"),
    ],
)
def test_a_function_that_does_not_work_is_refused_at_once(function, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(PROMPT, greedy(3, logits_processors=[LogitsProcessor(function)]))
    assert not engine.has_unfinished()


def test_a_state_function_that_fails_later_ends_its_request_alone():
    def state(prompt, output):
        if len(output) == 3:
            raise RuntimeError("no more")
        return {"token": np.int32(5)}

    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(8, logits_processors=[LogitsProcessor(prefer, state=state)]), "bad")
    engine.add_request(prompt_of(5, 1), greedy(8), "good")
    finished = run_all(engine)
    assert finished["bad"].outputs[0].finish_reason == "error"
    assert finished["bad"].outputs[0].token_ids == [5, 5, 5]
    assert finished["good"].outputs[0].token_ids == naive_greedy(prompt_of(5, 1), 8)


def halve(logits, state):
    half = (state // 2 if state.dtype == jnp.int32 else jnp.round(state / 2)).astype(jnp.int32)
    return jnp.where(jnp.arange(VOCAB_SIZE)[None, :] == half[:, None], 1e3, logits)


def test_a_neighbours_state_changes_neither_dtype_nor_shape():
    as_int = greedy(3, logits_processors=[LogitsProcessor(halve, state=np.int32(7))])
    as_float = greedy(3, logits_processors=[LogitsProcessor(halve, state=np.float32(7))])
    assert ids_of((PROMPT, as_int), (prompt_of(5, 1), as_float)) == [[3] * 3, [4] * 3]
    add_sum = lambda logits, state: logits + state.sum(axis=-1, keepdims=True)  # noqa: E731
    of_3, of_4 = (greedy(6, logits_processors=[LogitsProcessor(add_sum, state=np.ones(n, np.float32))]) for n in (3, 4))
    outputs = ids_of((PROMPT, of_3), (prompt_of(5, 1), of_4), (prompt_of(6, 2), greedy(6)))
    for (length, seed), output in zip([(9, 0), (5, 1), (6, 2)], outputs, strict=True):
        assert_greedy(prompt_of(length, seed), output)


def only_one_row(logits, state):
    if len(logits) > 1:
        raise RuntimeError("more than one row")
    return logits


def test_b67_a_function_that_fails_in_a_step_ends_its_requests_alone():
    def fails_at_3(logits, state):
        def check(step):
            if (step == 3).any():
                raise RuntimeError("not this one")
            return step

        step = jax.pure_callback(check, jax.ShapeDtypeStruct(state["step"].shape, jnp.float32), state["step"])
        return logits + 0 * step[:, None]

    late = LogitsProcessor(fails_at_3, state=lambda prompt, output: {"step": np.float32(len(output))})
    engine = tiny_engine()
    engine.add_request(PROMPT, greedy(8, logits_processors=[LogitsProcessor(only_one_row)]), "at once")
    engine.add_request(prompt_of(7, 2), greedy(8, logits_processors=[late]), "late")
    engine.add_request(prompt_of(5, 1), greedy(8), "good")
    finished = run_all(engine)
    assert finished["at once"].outputs[0].finish_reason == "error"
    assert finished["late"].outputs[0].finish_reason == "error"
    assert len(finished["late"].outputs[0].token_ids) == 3
    assert finished["good"].outputs[0].token_ids == naive_greedy(prompt_of(5, 1), 8)
