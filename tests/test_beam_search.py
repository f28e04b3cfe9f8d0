"""Beam search without the engine: by hand, against numpy, and against transformers' own, token for token."""

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import unchecked

from pagedjax.beams.choose import choose_candidates
from pagedjax.beams.params import BeamSearchParams
from pagedjax.beams.search import BeamSearch, Hypothesis
from pagedjax.sampling.logprobs import token_logprobs

# --- params

UncheckedParams = unchecked("pagedjax.beams.params").BeamSearchParams

REFUSED: dict[str, list[Any]] = {
    "beam_width": [0, -1, 4097, 2.0, True, None, "2", math.nan],
    "n": [0, -1, 5, 1.0, True, "1", math.nan],
    "length_penalty": [math.nan, math.inf, -5.1, 10**400, "1", True, None],
    "early_stopping": [None, 0, 1, "always", "Never", "", b"never", 1.0, ["never"]],
    "max_tokens": [0, -1, 1.0, True, "1", math.nan],
    "stop_token_ids": ["5", b"5", 5, [-1], [True], [1.0], None, {5}],
    **{name: [None, 0, 1, "yes"] for name in ("ignore_eos", "skip_special_tokens", "detokenize")},
}
TAKEN: dict[str, list[Any]] = {
    "beam_width": [4, 4096, np.int64(6)],
    "n": [None, 1, 4, np.int32(2)],
    "length_penalty": [0, -5, 5, 0.5, np.float32(0.5)],
    "early_stopping": [True, False, "never"],
    "max_tokens": [None, 1, 2**31 - 1, np.int64(3)],
    "stop_token_ids": [(), (5,), (np.int64(2), 0)],
    **{name: [True, False] for name in ("ignore_eos", "skip_special_tokens", "detokenize")},
}


def fields(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), fields(REFUSED))
def test_what_is_refused_is_named_with_what_it_got(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .* got .*"):
        UncheckedParams(**{"beam_width": 4, name: value})


@pytest.mark.parametrize(("name", "value"), fields(TAKEN))
def test_what_is_taken(name, value):
    assert getattr(UncheckedParams(**{"beam_width": 4, name: value}), name) == value


def test_beam_width_must_be_given():
    with pytest.raises(TypeError, match="beam_width"):
        UncheckedParams()


def test_what_was_checked_stays_so():
    ids = [1, 2]
    params = BeamSearchParams(beam_width=2, stop_token_ids=ids)
    ids.append(-1)
    assert params.stop_token_ids == (1, 2)
    assert (params.num_returned, BeamSearchParams(beam_width=2, n=1).num_returned) == (2, 1)


# --- the search, by hand

EOS, STOP = 0, 9
Candidate = tuple[float, int, int]


def search_of(width: int, max_tokens: int = 8, **options: Any) -> BeamSearch:
    params = BeamSearchParams(beam_width=width, stop_token_ids=(STOP,), **options)
    return BeamSearch(params, frozenset({EOS}), max_tokens)


def advance(search: BeamSearch, *candidates: Candidate) -> list[tuple[int, int]]:
    """Candidates (score, beam, token), padded as a batch is that has wider searches in it."""
    scores, beams, tokens = zip(*candidates, *[(-math.inf, 0, 0)] * 3, strict=True)
    return search.advance(scores, beams, tokens)


def short(hypotheses: Iterable[Hypothesis]) -> list[tuple[Any, ...]]:
    return [(h.token_ids, pytest.approx(h.score), h.finish_reason, h.stop_reason) for h in hypotheses]


def test_num_candidates():
    """Twice the width, or as many times as it takes for all ends of all beams to leave `width` others."""
    for ends, expected in [((), 6), ((1,), 6), ((1, 2), 9), ((1, 2, 3), 12)]:
        assert BeamSearch(BeamSearchParams(beam_width=3), frozenset(ends), 4).num_candidates == expected
        params = BeamSearchParams(beam_width=3, stop_token_ids=ends)
        assert BeamSearch(params, frozenset({1}), 4).num_candidates == max(expected, 6)


def test_the_prompt_is_one_beam_and_an_abort_gives_the_best_so_far():
    search = search_of(2, length_penalty=-1.0)
    assert (search.scores, search.token_ids, search.is_done) == ([0.0], [[]], False)
    assert search.hypotheses() == [Hypothesis((), 0.0, 0.0)]
    assert advance(search, (-1.0, 0, 5), (-2.0, 0, EOS), (-2.5, 0, 6), (-3.0, 0, 7)) == [(0, 5), (0, 6)]
    assert (search.scores, search.token_ids) == ([-1.0, -2.5], [[5], [6]])
    assert short(search.hypotheses()) == [((5,), -1.0, None, None), ((EOS,), -2.0, "stop", None)]
    assert advance(search, (-1.5, 0, 8), (-3.0, 1, 7), (-3.5, 0, 7), (-4.0, 1, 8)) == [(0, 8), (1, 7)]
    assert short(search.hypotheses()) == [((EOS,), -2.0, "stop", None), ((5, 8), -3.0, None, None)]


def test_an_end_that_ranks_below_the_width_is_no_hypothesis():
    search = search_of(2, early_stopping=True)
    assert advance(search, (-1.0, 0, 5), (-1.5, 0, 6), (-1.6, 0, EOS), (-1.7, 0, STOP)) == [(0, 5), (0, 6)]
    # Ends do not take the place of a beam, whatever their rank.
    assert advance(search, (-1.1, 0, EOS), (-1.2, 0, 7), (-1.7, 1, EOS), (-1.8, 1, 8)) == [(0, 7), (1, 8)]
    assert [h.token_ids for h in search.hypotheses()] == [(5, EOS), (5, 7)]
    assert advance(search, (-1.3, 0, STOP), (-1.9, 1, 7), (-2.0, 1, 8)) == []
    assert search.is_done
    assert short(search.hypotheses()) == [
        ((5, 7, STOP), -1.3 / 3, "stop", STOP),
        ((5, EOS), -1.1 / 2, "stop", None),
    ]


def test_a_stop_id_that_is_the_models_own_end_is_no_stop_reason():
    params = BeamSearchParams(beam_width=1, stop_token_ids=(EOS,))
    search = BeamSearch(params, frozenset({EOS}), 4)
    advance(search, (-1.0, 0, EOS), (-2.0, 0, 5))
    assert short(search.hypotheses()) == [((EOS,), -1.0, "stop", None)]
    search = BeamSearch(params, frozenset(), 4)
    advance(search, (-1.0, 0, EOS), (-2.0, 0, 5))
    assert short(search.hypotheses()) == [((EOS,), -1.0, "stop", EOS)]


TWO_ENDED: list[list[Candidate]] = [
    [(-1.0, 0, 5), (-3.0, 0, EOS), (-3.1, 0, 6), (-9.0, 0, 7)],
    [(-1.2, 0, 7), (-3.2, 1, EOS), (-3.3, 1, 6), (-9.0, 0, 8)],
]
"""After two steps of width 2 the hypotheses are (EOS,): -3.0 and (6, EOS): -3.2; the best beam is (5, 7): -1.2."""


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (True, 1.0, True),  # two have ended
        (False, 1.0, False),  # -1.2 / 2 against -3.0
        ("never", 1.0, False),
        (False, -1.0, False),  # -1.2 * 2 against -6.4
        ("never", -1.0, False),
        (False, -2.0, False),  # -1.2 * 4 against -12.8, although the other has -3.0
    ],
)
def test_when_as_many_as_the_width_have_ended(early_stopping, length_penalty, is_done):
    search = search_of(2, early_stopping=early_stopping, length_penalty=length_penalty)
    for step in TWO_ENDED:
        assert not search.is_done
        advance(search, *step)
    assert search.is_done == is_done
    assert (search.token_ids == []) == is_done


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [
        (False, 0.0, True),  # -3.5 can only fall
        ("never", 0.0, True),
        (False, 1.0, True),  # -3.5 / 2 is taken for the best it can be
        ("never", 1.0, False),  # but -3.5 / 8 is possible
        ("never", -1.0, True),  # a longer one is only worse
        (False, 2.0, True),
        ("never", 2.0, False),
    ],
)
def test_how_far_ahead_the_best_beam_is_judged(early_stopping, length_penalty, is_done):
    search = search_of(1, early_stopping=early_stopping, length_penalty=length_penalty)
    assert advance(search, (-1.0, 0, 5), (-2.0, 0, EOS)) == [(0, 5)]
    going_on = advance(search, (-1.5, 0, EOS), (-3.5, 0, 6))
    assert (search.is_done, going_on) == (is_done, [] if is_done else [(0, 6)])


@pytest.mark.parametrize(("length_penalty", "scores"), [(0, (-3, -4)), (1, (-3, -2)), (2, (-3, -1)), (-1, (-3, -8))])
def test_scores_are_over_the_length_with_the_end(length_penalty, scores):
    search = search_of(2, length_penalty=float(length_penalty), early_stopping=True)
    advance(search, (-2.0, 0, 5), (-3.0, 0, EOS), (-3.5, 0, 6))
    advance(search, (-4.0, 0, EOS), (-5.0, 1, 6))
    assert search.is_done
    found = {h.token_ids: h.score for h in search.hypotheses()}
    assert found == {(EOS,): pytest.approx(scores[0]), (5, EOS): pytest.approx(scores[1])}
    assert [h.score for h in search.hypotheses()] == sorted(scores, reverse=True)
    assert [h.cumulative_logprob for h in search.hypotheses()] == ([-3, -4] if scores[0] > scores[1] else [-4, -3])


def test_a_better_hypothesis_takes_the_place_of_the_worst_and_n_are_returned():
    search = search_of(2, n=1, early_stopping="never", length_penalty=2.0)
    for step in TWO_ENDED:
        advance(search, *step)
    advance(search, (-1.3, 0, STOP), (-9.0, 1, 6), (-10.0, 0, 5), (-11.0, 0, 6))
    assert short(search.hypotheses()) == [((5, 7, STOP), -1.3 / 9, "stop", STOP)]
    search.params = BeamSearchParams(beam_width=2, length_penalty=2.0)
    assert [h.token_ids for h in search.hypotheses()] == [(5, 7, STOP), (6, EOS)]


def test_width_1_is_greedy():
    search = search_of(1)
    assert advance(search, (-1.0, 0, 5), (-1.1, 0, EOS)) == [(0, 5)]
    assert advance(search, (-1.5, 0, 6), (-1.6, 0, 7)) == [(0, 6)]
    assert advance(search, (-1.7, 0, EOS), (-1.8, 0, 7)) == []
    assert short(search.hypotheses()) == [((5, 6, EOS), -1.7 / 3, "stop", None)]


def test_the_end_as_the_best_first_token():
    search = search_of(2)
    assert advance(search, (-0.1, 0, EOS), (-3.0, 0, 5), (-4.0, 0, 6), (-5.0, 0, 7)) == [(0, 5), (0, 6)]
    assert advance(search, (-3.1, 0, EOS), (-4.1, 1, EOS), (-6.0, 0, 5), (-7.0, 0, 6)) == []
    assert [h.token_ids for h in search.hypotheses()] == [(EOS,), (5, EOS)]


def test_at_max_tokens_the_first_of_the_candidates_end_whatever_they_are():
    search = search_of(2, max_tokens=1)
    assert advance(search, (-1.0, 0, 5), (-2.0, 0, EOS), (-3.0, 0, 6), (-4.0, 0, 7)) == []
    assert search.is_done
    assert short(search.hypotheses()) == [((5,), -1.0, "length", None), ((EOS,), -2.0, "stop", None)]


def test_at_max_tokens_they_compete_with_those_that_ended_before():
    search = search_of(2, max_tokens=2, length_penalty=0.0)
    advance(search, (-1.0, 0, 5), (-1.5, 0, EOS), (-2.0, 0, 6), (-4.0, 0, 7))
    advance(search, (-1.4, 0, 7), (-1.6, 0, STOP), (-2.1, 1, 7), (-2.2, 1, EOS))
    assert short(search.hypotheses()) == [((5, 7), -1.4, "length", None), ((EOS,), -1.5, "stop", None)]


def test_a_vocabulary_smaller_than_the_width():
    """Two tokens and an end: at first there are two beams, and no end in their place."""
    search = search_of(4, max_tokens=2)
    assert advance(search, (-1.0, 0, 5), (-1.1, 0, EOS), (-1.2, 0, 6)) == [(0, 5), (0, 6)]
    advance(search, (-2.0, 0, 5), (-2.1, 1, 5), (-2.2, 0, 6), (-2.3, 1, EOS), (-2.4, 1, 6), (-2.5, 0, EOS))
    assert [h.token_ids for h in search.hypotheses()] == [(5, 5), (6, 5), (EOS,), (5, 6)]


def test_fewer_sequences_than_were_asked_for():
    search = search_of(4)
    assert advance(search, (-1.0, 0, EOS), (-1.1, 0, STOP)) == []
    assert search.is_done
    assert [h.token_ids for h in search.hypotheses()] == [(EOS,), (STOP,)]


def test_equal_scores_keep_their_order():
    search = search_of(2, length_penalty=0.0)
    advance(search, (-1.0, 0, EOS), (-1.0, 0, 5), (-1.0, 0, 6), (-1.0, 0, 7))
    assert search.token_ids == [[5], [6]]
    assert [h.token_ids for h in search.hypotheses()] == [(EOS,), (5,)]
    assert advance(search, (-1.0, 0, STOP), (-1.0, 0, EOS), (-1.0, 1, 8)) == []  # -1 is no better than -1
    assert [h.token_ids for h in search.hypotheses()] == [(EOS,), (5, STOP)]


def test_scores_are_f32():
    search = search_of(1, max_tokens=3, length_penalty=0.5)
    for _ in range(3):
        advance(search, (float(np.float32(search.scores[0] - 1.1)), 0, 5))
    [hypothesis] = search.hypotheses()
    # As floats: compared with an f32, the other side is rounded to it first.
    assert hypothesis.score == float(np.float32(hypothesis.cumulative_logprob) / np.float32(3**0.5))


# --- the step's candidates

jit_choose = jax.jit(choose_candidates, static_argnums=4)
jit_logprobs = jax.jit(token_logprobs, static_argnums=2)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([2, 5, 300]),
    num_groups=st.sampled_from([1, 3]),
    width=st.sampled_from([1, 2, 4]),
    is_coarse=st.booleans(),
)
def test_candidates_are_the_best_over_beams_and_vocabulary(seed, vocab_size, num_groups, width, is_coarse):
    rng = np.random.default_rng(seed)
    num_candidates = min(2 * width, width * vocab_size)
    num_top = min(num_candidates, vocab_size)
    logits = rng.normal(0, 3, (num_groups * width + 2, vocab_size)).astype(np.float32)
    scores = rng.normal(-5, 3, (num_groups, width)).astype(np.float32)
    if is_coarse:  # many ties; every row has the same sum of exponentials
        logits = rng.permuted(np.broadcast_to(np.arange(vocab_size, dtype=np.float32) // 2, logits.shape), axis=1)
        scores = np.round(scores / 4) * 4
    rows = rng.permutation(len(logits))[: num_groups * width].reshape(num_groups, width).astype(np.int32)
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    scores[:, 0] = np.maximum(scores[:, 0], -9)
    top = jax.tree.map(np.asarray, jit_logprobs(logits, np.zeros(len(logits), np.int32), num_top))
    logprobs = np.asarray(jit_logprobs(logits, np.zeros(len(logits), np.int32), vocab_size).top_logprobs)
    by_id = np.empty_like(logprobs)
    np.put_along_axis(by_id, np.argsort(-logits, axis=1, kind="stable"), logprobs, axis=1)
    padding = rows[scores == -np.inf]
    top_logprobs = top.top_logprobs.copy()
    top_logprobs[padding] = np.nan  # nobody's rows

    out = jax.tree.map(np.asarray, jit_choose(top_logprobs, top.top_ids, rows, scores, num_candidates))
    assert (out.scores.dtype, out.beams.dtype, out.tokens.dtype) == (np.float32, np.int32, np.int32)
    for group in range(num_groups):
        totals = (scores[group][:, None] + by_id[rows[group]]).ravel()
        expected = np.argsort(-totals, kind="stable")[:num_candidates]
        is_real = totals[expected] > -np.inf
        assert np.array_equal(out.scores[group], totals[expected])
        assert np.array_equal(out.beams[group][is_real], expected[is_real] // vocab_size)
        assert np.array_equal(out.tokens[group][is_real], expected[is_real] % vocab_size)
    assert np.all((out.beams >= 0) & (out.beams < width) & (out.tokens >= 0) & (out.tokens < vocab_size))


# --- transformers' beam search

WIDTHS = (1, 2, 3, 4, 6)
LENGTH_PENALTIES = (0.0, 1.0, 2.0, -1.0, 0.5)
EARLY_STOPPING = (False, True, "never")
ENDS: tuple[tuple[int, ...], ...] = ((), (3,), (1, 3))
STRIDE = 7
"""One in so many of the 1,350 combinations runs; prime to the lengths of the tables, so that all their values meet."""
GARBAGE = -1e5
"""Below it are the scores of transformers' filling: -1e9 over a length to the power of the penalty, 20**2 at most."""


class Oracle(NamedTuple):
    """A tiny Llama of transformers', and the log-probabilities after each context that was asked for."""

    model: Any
    logprobs: dict[tuple[int, ...], np.ndarray]

    def logprobs_after(self, contexts: list[tuple[int, ...]]) -> np.ndarray:
        """f32[contexts, vocabulary]: the slow, obvious way, each context through the whole model."""
        torch: Any = pytest.importorskip("torch", reason="torch is the oracle")

        missing = [context for context in contexts if context not in self.logprobs]
        if missing:
            with torch.no_grad():
                logits = self.model(torch.tensor(missing), use_cache=False).logits[:, -1].float()
            self.logprobs.update(zip(missing, torch.log_softmax(logits, dim=-1).numpy(), strict=True))
        return np.stack([self.logprobs[context] for context in contexts])


def make_oracle(vocab_size: int) -> Oracle:
    """In f64, so that a cache and other batches do not change the last bits of what it rounds to f32: near ties fall
    alike. The ends' rows of the head are scaled, so that many hypotheses end."""
    torch: Any = pytest.importorskip("torch", reason="torch is the oracle")
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as TheirLlama

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=vocab_size, initializer_range=0.4, max_position_embeddings=64, **sizes, **special)
    model = TheirLlama(config).eval().double()
    with torch.no_grad():
        for end in ENDS[-1]:
            model.lm_head.weight[end] *= 2.0
    return Oracle(model, {})


def our_search(oracle: Oracle, prompt: tuple[int, ...], search: BeamSearch) -> list[Hypothesis]:
    while not search.is_done:
        contexts = [prompt + tuple(output) for output in search.token_ids]
        logprobs = oracle.logprobs_after(contexts)
        totals = (logprobs + np.array(search.scores, np.float32)[:, None]).ravel()
        best = np.argsort(-totals, kind="stable")[: search.num_candidates]
        beams, tokens = np.divmod(best, logprobs.shape[1])
        search.advance(totals[best].tolist(), beams.tolist(), tokens.tolist())
    return search.hypotheses()


def their_search(oracle: Oracle, prompt: tuple[int, ...], **options: Any) -> list[tuple[tuple[int, ...], float]]:
    """Output ids and scores, without what has a score near -1e9."""
    torch: Any = pytest.importorskip("torch", reason="torch is the oracle")

    out = oracle.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    outputs = [
        tuple(ids[: len(prompt) + length][len(prompt) :].tolist())
        for ids, length in zip(out.sequences, lengths, strict=True)
    ]
    return [pair for pair in zip(outputs, out.sequences_scores.tolist(), strict=True) if pair[1] > GARBAGE]


@pytest.fixture
def _one_torch_thread():
    """More wait for each other far longer than such small matrices take, on a busy machine 30 times as long."""
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def _width_1_is_a_beam_search_too(monkeypatch):
    """transformers has a greedy loop of its own for num_beams=1; here it is to run the same code as for the others."""
    from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

    monkeypatch.setattr(GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH)


@pytest.mark.oracle
@pytest.mark.usefixtures("_one_torch_thread", "_width_1_is_a_beam_search_too")
@pytest.mark.parametrize("vocab_size", [5, 64])
def test_equals_transformers(vocab_size):
    """Ids, order, and scores; with a stride of 1 all combinations hold, to the last bit."""
    oracle = make_oracle(vocab_size)
    rng = np.random.default_rng(0)
    lengths: list[tuple[str | None, int]] = []
    combinations = list(product(WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, ENDS, (1, 10), (1, 8, 20)))
    for width, length_penalty, early_stopping, ends, prompt_len, max_tokens in combinations[::STRIDE]:
        prompt = tuple(rng.integers(0, vocab_size, prompt_len).tolist())
        n = int(rng.integers(1, width + 1))
        params = BeamSearchParams(
            beam_width=width, n=n, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=max_tokens
        )
        ours = our_search(oracle, prompt, BeamSearch(params, frozenset(ends), max_tokens))
        theirs = their_search(
            oracle,
            prompt,
            num_beams=width,
            num_return_sequences=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(ends) or None,
            max_new_tokens=max_tokens,
        )
        what = (params, ends, prompt)
        assert [h.token_ids for h in ours] == [token_ids for token_ids, _ in theirs], what
        assert [h.score for h in ours] == pytest.approx([score for _, score in theirs], rel=0, abs=1e-5), what
        lengths += [(h.finish_reason, len(h.token_ids)) for h in ours]
    assert len(combinations[::STRIDE]) == 193
    assert sum(reason == "stop" and length > 1 for reason, length in lengths) > 50  # or the ends were not tested
    assert sum(reason == "length" and length == 20 for reason, length in lengths) > 50
