"""Three logits processors in one batch with requests that use none of them.

A temperature that falls as the text grows, a watermark with its detector (Kirchenbauer et al., arXiv 2301.10226), and
contrastive decoding against a weaker model (Li et al., arXiv 2210.15097).
"""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pagedjax import LLM, LogitsProcessor, SamplingParams, load
from pagedjax.models.decoder import CausalLM

# --- a temperature schedule. The state is made on the host for each token; the function gets all rows' states stacked.


def divide_by_temperature(logits: Array, state: dict[str, Array]) -> Array:
    return logits / state["temperature"][:, None]


def cool_down(hot: float, cold: float, num_tokens: int) -> LogitsProcessor:
    """From `hot` to `cold` within the first `num_tokens` tokens, in equal ratios."""

    def state(prompt: Sequence[int], output: Sequence[int]) -> dict[str, np.float32]:
        progress = min(len(output) / num_tokens, 1.0)
        return {"temperature": np.float32(hot ** (1 - progress) * cold**progress)}

    return LogitsProcessor(divide_by_temperature, state=state)


# --- a watermark: the token before, and a secret, choose a quarter of the vocabulary, which gets a bonus. Whoever knows
# the secret counts how often a text follows.
SECRET, GAMMA, DELTA = 15485863, 0.25, 3.0


def green_lists(previous: Array, vocab_size: int) -> Array:
    """bool[n, V]: after each of these tokens, every token is green with probability GAMMA."""
    keys = jax.vmap(lambda token: jax.random.fold_in(jax.random.key(SECRET), token))(previous)
    return jax.vmap(lambda key: jax.random.bernoulli(key, GAMMA, (vocab_size,)))(keys)


def prefer_green(logits: Array, state: dict[str, Array]) -> Array:
    return jnp.where(green_lists(state["previous"], logits.shape[1]), logits + DELTA, logits)


watermark = LogitsProcessor(prefer_green, state=lambda prompt, output: {"previous": np.int32((output or prompt)[-1])})


def z_score(token_ids: Sequence[int], vocab_size: int) -> float:
    """Standard deviations above chance. A pair that comes again says nothing new, so each counts once."""
    previous, token = jnp.array(sorted(set(pairwise(token_ids)))).T
    num_green = green_lists(previous, vocab_size)[jnp.arange(len(token)), token].sum()
    return float(num_green - GAMMA * len(token)) / (GAMMA * (1 - GAMMA) * len(token)) ** 0.5


# --- contrastive decoding: among the tokens that the model finds plausible, the one that it likes most above what an
# amateur likes. The amateur is the model without its middle layers, and reads the last WINDOW tokens alone.
ALPHA, WINDOW = 0.1, 16


def contrast_with(model: CausalLM, params: dict[str, Any], num_dropped: int) -> LogitsProcessor:
    """The amateur's params are shared between requests, and are the model's own arrays: nothing is copied."""
    num_kept = model.config.num_layers - num_dropped
    kept = [i if i < num_kept // 2 else i + num_dropped for i in range(num_kept)]
    amateur = CausalLM(dataclasses.replace(model.config, num_layers=num_kept))
    shared = {name: value for name, value in params.items() if not name.startswith("layers_")}
    shared |= {f"layers_{i}": params[f"layers_{layer}"] for i, layer in enumerate(kept)}

    def state(prompt: Sequence[int], output: Sequence[int]) -> dict[str, Any]:
        last = [*prompt, *output][-WINDOW:]  # and padding behind, which causal attention does not see
        return {"window": np.array(last + [0] * (WINDOW - len(last)), np.int32), "length": np.int32(len(last))}

    def contrast(logits: Array, state: dict[str, Array], shared: dict[str, Any]) -> Array:
        every: Any = amateur.apply({"params": shared}, state["window"])
        theirs = jnp.take_along_axis(every, (state["length"] - 1)[:, None, None], axis=1)[:, 0]
        ours = jax.nn.log_softmax(logits)
        is_plausible = ours >= ours.max(axis=1, keepdims=True) + jnp.log(ALPHA)
        return jnp.where(is_plausible, ours - jax.nn.log_softmax(theirs), -jnp.inf)

    return LogitsProcessor(contrast, state=state, shared=shared)


def main() -> None:
    model, params, tokenizer = load("smollm2-135m-instruct")
    llm = LLM(model, params=params, tokenizer=tokenizer, max_num_seqs=5, warm_up=False)
    sampled: dict[str, Any] = {"seed": 1, "max_tokens": 100, "ignore_eos": True}
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    story = "The old lighthouse keeper opened the door, looked out at the sea, and"
    question = llm.render_chat([{"role": "user", "content": "Why do people climb mountains?"}])
    cooling, contrast = cool_down(1.5, 0.2, num_tokens=50), contrast_with(model, params, num_dropped=8)
    requests = {
        "unmarked": (story, SamplingParams(**sampled)),
        "marked": (story, SamplingParams(**sampled, logits_processors=[watermark])),
        "cooled": (story, SamplingParams(**sampled, logits_processors=[cooling], logprobs=0)),
        "greedy": (question, SamplingParams(**greedy)),
        "contrastive": (question, SamplingParams(**greedy, logits_processors=[contrast])),
    }
    prompts, sampling_params = zip(*requests.values(), strict=True)
    outputs = llm.generate(prompts, sampling_params)
    answers = {name: output.outputs[0] for name, output in zip(requests, outputs, strict=True)}
    for name, answer in answers.items():
        print(f"\n--- {name}\n{answer.text.strip()}")
    cooled = answers["cooled"]
    ranks = [entry[token].rank for entry, token in zip(cooled.logprobs or [], cooled.token_ids, strict=True)]
    first, last = np.mean(ranks[:25]), np.mean(ranks[-25:])
    print(f"\ncooled: the mean rank of its first 25 tokens is {first:.1f}, of its last 25 {last:.1f}")
    # The detector has the text alone, neither prompt nor model.
    texts = tokenizer([answers["marked"].text, answers["unmarked"].text])["input_ids"]
    marked, unmarked = (z_score(token_ids, model.config.vocab_size) for token_ids in texts)
    print(f"watermark: z = {marked:.1f} for the marked text, {unmarked:.1f} for the unmarked one")


if __name__ == "__main__":
    main()
