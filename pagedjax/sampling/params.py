"""How one request samples and when it stops: vLLM's field names, validated field by field. Host only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from pagedjax.sampling import checks
from pagedjax.sampling.processors import LogitsProcessor

MAX_SEED = 2**64 - 1
"""Seeds are 64-bit and unsigned: any other int is refused, as wrapped it would coincide with one of these."""

TokenMask = Callable[[Sequence[int], Sequence[int]], np.ndarray | None]
"""From (prompt ids, output ids) to what may be sampled next, see `SamplingParams.token_mask`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling options. What they do to the logits, they do in this order, as in transformers:

    1. logit_bias is added;
    2. repetition_penalty, then frequency_penalty and presence_penalty;
    3. what may not be sampled goes: allowed_token_ids, bad_words, min_tokens, token_mask;
    4. logits_processors, in their order;
    5. temperature, top_k, top_p, min_p.

    Step 3 never takes a row's last token away: if it would, bad_words and min_tokens do not act on that token, and if
    allowed_token_ids and token_mask have none in common, neither do they.

    Raises ValueError that names the field, what it got and what it expects.
    """

    n: int = 1
    """Number of completions. Each has its own random stream, in order: output i of seed s is always the same."""
    temperature: float = 1.0
    """0 is greedy, as is any value so small that it would be 0 in float32; large values approach uniform."""
    top_k: int = 0
    """Keep the k most likely tokens (ties of the k-th are kept); 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p; 1.0 keeps all, 0 is greedy."""
    min_p: float = 0.0
    """Keep the tokens that are at least min_p times as likely as the most likely one; 0 keeps all."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the output has already; the prompt does not count. -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for each time that the output has it; the prompt does not count. -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that prompt or output have, and multiplies negative ones; 1 does nothing."""
    logit_bias: Mapping[int | str, float] | None = None
    """Added to the logits of these token ids, -100 to 100; ids may be written as strings, and are ints afterwards."""
    bad_words: Sequence[str | Sequence[int]] = ()
    """Texts, at the begin of a word or after a space, or lists of token ids that the output must not complete. A list's
    last id is banned while the tokens before, the prompt's included, are its other ids."""
    allowed_token_ids: Sequence[int] | None = None
    """The only token ids that may be sampled; an end-of-sequence id that is not among them cannot end the output."""
    token_mask: TokenMask | None = None
    """Where a grammar plugs in: called on the host before each token with (prompt ids, output ids), which it must not
    change. Returns uint32[ceil(vocabulary / 32)] where bit i % 32 of word i // 32 says whether token i may come next,
    or None for no restriction; the array may be reused. All n completions share it. If it raises or returns anything
    else, its request ends with finish reason "error"."""
    logits_processors: Sequence[LogitsProcessor] = ()
    """Functions that change the logits on the device."""
    seed: int | None = None
    """0 to 2**64 - 1. The same seed gives the same tokens whatever else is in the batch; None draws a fresh one."""
    max_tokens: int | None = 16
    """Most tokens to generate; None generates until a stop or the model's length limit, 0 only computes the prompt: for
    its log-probabilities, or to have it in the prefix cache."""
    min_tokens: int = 0
    """Until there are so many, no end-of-sequence token and none of stop_token_ids is sampled, and stop strings that
    are complete by then do not act."""
    stop: str | Sequence[str] = ()
    """Strings that end the output: the one that is complete first wins, and of those that end at the same character
    the longest, however the text is split over tokens."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, kept in token_ids; they also act with ignore_eos."""
    include_stop_str_in_output: bool = False
    """Whether the text ends with the stop string that ended it, or just before it."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """Whether to produce text at all; stop strings need it."""
    logprobs: int | None = None
    """Give the log-probabilities of so many most likely tokens, and of the sampled one; -1 is the vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    prompt_logprobs_start: int = 1
    """The first position of the prompt that prompt_logprobs are given for. Those before are None, and only for them can
    the prefix cache save the computation."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        checks.check_stop(self.stop)
        checks.check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", MappingProxyType(checks.checked_logit_bias(self.logit_bias)))
        checks.check_bad_words(self.bad_words)
        if self.allowed_token_ids is not None:
            checks.check_token_ids("allowed_token_ids", self.allowed_token_ids, may_be_empty=False)
        if self.token_mask is not None and not callable(self.token_mask):
            raise ValueError(f"token_mask must be callable or None, got {self.token_mask!r}")
        checks.check_logits_processors(self.logits_processors)
        self._own_sequences()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            checks.check_bool(name, getattr(self, name))
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")

    def _own_sequences(self) -> None:
        """What was checked stays so, whatever the caller does with his lists."""
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "logits_processors"):
            if not isinstance(value := getattr(self, name), str | None):
                object.__setattr__(self, name, tuple(value))
        words = tuple(word if isinstance(word, str) else tuple(word) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)

    def _check_numbers(self) -> None:
        checks.check_int("n", self.n, 1, 4096)
        checks.check_float("temperature", self.temperature, 0.0, 3.4e38)
        checks.check_int("top_k", self.top_k, -1)
        checks.check_float("top_p", self.top_p, 0.0, 1.0)
        checks.check_float("min_p", self.min_p, 0.0, 1.0)
        checks.check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        checks.check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Above 0 and finite, and no farther than that a float32 logit stays so: two infinite ones would become NaN.
        checks.check_float("repetition_penalty", self.repetition_penalty, 1e-30, 1e30)
        if self.seed is not None:
            checks.check_int("seed", self.seed, 0, MAX_SEED)

    def _check_lengths(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                checks.check_int(name, value, -1)
        checks.check_int("prompt_logprobs_start", self.prompt_logprobs_start, 1)
        checks.check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is None:
            return
        checks.check_int("max_tokens", self.max_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @cached_property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @cached_property
    def edits_logits(self) -> bool:
        """Whether anything of steps 1 to 3 is asked for. Looked up for each request in each step, so kept."""
        restricts = self.allowed_token_ids is not None or self.token_mask is not None
        return bool(self.logit_bias or self.bad_words or self.min_tokens) or self.has_penalties or restricts

    @cached_property
    def has_extras(self) -> bool:
        """Whether anything is asked for beyond choosing from the model's own logits."""
        wants_logprobs = self.logprobs is not None or self.prompt_logprobs is not None
        return self.edits_logits or bool(self.logits_processors) or wants_logprobs

    def num_logprobs(self, vocab_size: int) -> int | None:
        """`logprobs` as a count."""
        return vocab_size if self.logprobs == -1 else self.logprobs

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        """`prompt_logprobs` as a count."""
        return vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs
