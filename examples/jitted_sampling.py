"""Batch sampling in one jit: prompts in, samples out, no engine and no host loop.

    python examples/jitted_sampling.py [MODEL]

`functional.generate` is a pure function of arrays: the KV cache is paged, shared by the samples of a prompt, and lives
and dies inside the compiled program. Other lengths, keys and temperatures run the same program.
"""

import sys
from functools import partial

import jax
import numpy as np

import pagedjax
from pagedjax import functional

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, in a village between two mountains,"]

model, params, tokenizer = pagedjax.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")

token_ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
prompt_lens = np.array([len(ids) for ids in token_ids], np.int32)
prompt_ids = np.zeros((len(PROMPTS), prompt_lens.max()), np.int32)
for row, ids in enumerate(token_ids):
    prompt_ids[row, : len(ids)] = ids  # padded on the right, with anything


@partial(jax.jit, static_argnames=("num_samples",))
def sample(params, prompt_ids, prompt_lens, key, temperature, num_samples):
    return functional.generate(
        model,
        params,
        prompt_ids,
        prompt_lens,
        key,
        max_new_tokens=24,
        num_samples=num_samples,
        temperature=temperature,
        top_p=0.95,
        eos_ids=(tokenizer.eos_token_id,),
    )


for temperature in (0.7, 1.2):  # the second call compiles nothing
    rollout = sample(params, prompt_ids, prompt_lens, jax.random.key(0), temperature, num_samples=2)
    print(f"--- temperature {temperature}")
    for prompt, samples, lengths, logprobs in zip(
        PROMPTS, rollout.token_ids, rollout.lengths, rollout.logprobs, strict=True
    ):
        for tokens, length, logprob in zip(samples, lengths, logprobs, strict=True):
            text = tokenizer.decode(np.asarray(tokens[:length]))
            print(f"{prompt!r} {text!r} ({int(length)} tokens, mean logprob {float(logprob.sum() / length):.2f})")

# A trainer's view of the same tokens: dense, differentiable, and equal up to rounding.
scores = functional.score_rollout(model, params, prompt_ids, prompt_lens, rollout)
print(f"sampler and trainer differ by {float(abs(scores - rollout.logprobs).max()):.1e} at most")
