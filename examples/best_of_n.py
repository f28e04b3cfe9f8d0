"""Best of n with a stopping rule of one's own, written in JAX on the building blocks of `pagedjax.functional`.

    python examples/best_of_n.py [MODEL]

Each sample ends with the first full stop, or as soon as its mean log-probability falls behind the best finished one of
its prompt: it could still be written, but it will not be chosen.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import pagedjax
from pagedjax import functional

PROMPT, NUM_SAMPLES, MAX_TOKENS = "The best thing about a rainy day is", 8, 32

model, params, tokenizer = pagedjax.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
prompt_ids = np.array([tokenizer(PROMPT)["input_ids"]], np.int32)
STOPS = jnp.array([i for i in range(model.config.vocab_size) if "." in tokenizer.decode([i])], jnp.int32)


@jax.jit
def best_of_n(params, prompt_ids, key):
    sizes = {"num_prompts": 1, "prompt_len": prompt_ids.shape[1], "max_new_tokens": MAX_TOKENS}
    dtype = params["embed_tokens"]["embedding"].dtype
    cache = functional.init_kv_cache(model, **sizes, num_samples=NUM_SAMPLES, dtype=dtype, exact_lens=True)
    logits, cache = functional.prefill(model, params, cache, prompt_ids)
    cache = functional.fork(cache)  # the samples share the prompt's blocks
    logits = jnp.repeat(logits, NUM_SAMPLES, axis=0)

    def draw(loop, logits):
        step, cache, tokens, total, length, goes_on, done = loop
        token = jax.random.categorical(jax.random.fold_in(key, step), logits)
        logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, step].set(jnp.where(goes_on, token, 0))
        total, length = total + jnp.where(goes_on, logprob, 0), length + goes_on
        done |= goes_on & jnp.isin(token, STOPS)
        best = jnp.max(jnp.where(done, total / length, -jnp.inf))
        return step + 1, cache, tokens, total, length, ~done & (total / length > best), done

    def turn(loop):
        step, cache, tokens, *rest = loop
        logits, cache = functional.decode_step(model, params, cache, tokens[:, step - 1], rest[2])
        return draw((step, cache, tokens, *rest), logits)

    none = jnp.zeros(NUM_SAMPLES, bool)
    tokens = jnp.zeros((NUM_SAMPLES, MAX_TOKENS), jnp.int32)
    start = (0, cache, tokens, jnp.zeros(NUM_SAMPLES), jnp.zeros(NUM_SAMPLES, jnp.int32), ~none, none)
    loop = jax.lax.while_loop(lambda loop: (loop[0] < MAX_TOKENS) & loop[5].any(), turn, draw(start, logits))
    step, _, tokens, total, length, _, done = loop
    return tokens, length, total / length, done, step


tokens, lengths, scores, done, steps = best_of_n(params, prompt_ids, jax.random.key(0))
for row in np.argsort(np.where(done, -scores, -scores + 1e3)):
    state = "ends" if done[row] else "given up"
    print(f"{float(scores[row]):6.2f} {state:8} {tokenizer.decode(np.asarray(tokens[row, : lengths[row]]))!r}")
print(f"{int(steps)} steps for {NUM_SAMPLES} samples, {int(lengths.sum())} tokens")
