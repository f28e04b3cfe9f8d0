"""A sampler as one writes it in plain JAX: a contiguous KV cache of [rows, heads, positions, width], in one jit.

The rival of `functional.generate`: the same weights, keys, sampler and log-probabilities, so the same tokens. It makes
the most of its form: prompts are computed once and then repeated for their samples, and as all have the same length,
each step writes one slice. Models of Llama's form without biases alone.

Keys may lie as values do, [positions, width], which is the plain way, or transposed, [width, positions]: on a CPU, XLA
then finds a product that takes an eighth of the time.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pagedjax import functional
from pagedjax.functional.keys import seeds_of
from pagedjax.model_input import SamplingInput
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params, embed_params, head_params, position_tables, read_out
from pagedjax.models.layers import apply_rope
from pagedjax.sampling.logprobs import token_logprobs
from pagedjax.sampling.sampler import sample

Cache = tuple[tuple[Float[Array, "R K S D"] | Float[Array, "R K D S"], Float[Array, "R K S D"]], ...]
"""Keys and values of each layer."""


class Loop(NamedTuple):
    """What one step hands to the next."""

    step: Int32[Array, ""]
    cache: Cache
    token_ids: Int32[Array, "R L"]
    logprobs: Float32[Array, "R L"]
    is_running: Array


def cache_bytes(config: ModelConfig, num_rows: int, num_positions: int, dtype: Any) -> int:
    """Bytes of keys and values."""
    numbers = 2 * config.num_layers * num_rows * config.num_kv_heads * num_positions * config.head_dim
    return numbers * jnp.dtype(dtype).itemsize


@partial(jax.jit, static_argnums=0, static_argnames=("max_new_tokens", "num_samples", "eos_ids", "transposed_keys"))
def generate(
    model: CausalLM,
    params: Params,
    prompt_ids: Int32[Array, "B T"],
    key: Any,
    temperature: Float32[Array, ""],
    *,
    max_new_tokens: int,
    num_samples: int,
    eos_ids: tuple[int, ...] = (),
    transposed_keys: bool = False,
) -> functional.Rollout:
    """N samples of B prompts that are all T tokens long."""
    num_prompts, prompt_len = prompt_ids.shape
    num_rows = num_prompts * num_samples
    seeds = jnp.repeat(seeds_of(key, num_prompts), num_samples, axis=0)
    sample_index = jnp.tile(jnp.arange(num_samples, dtype=jnp.uint32), num_prompts)
    ones, zeros = jnp.ones(num_rows, jnp.float32), jnp.zeros(num_rows, jnp.float32)

    def draw(loop: Loop, logits: Float32[Array, "R V"]) -> Loop:
        outputs = jnp.full(num_rows, loop.step, jnp.uint32)
        sampling = SamplingInput(ones * temperature, zeros.astype(jnp.int32), ones, zeros, seeds, sample_index, outputs)
        token = sample(logits, sampling)
        logprob = token_logprobs(logits, token, 0).logprob
        is_end = (token[:, None] == jnp.array(eos_ids, jnp.int32)[None, :]).any(axis=1)
        return Loop(
            step=loop.step + 1,
            cache=loop.cache,
            token_ids=loop.token_ids.at[:, loop.step].set(jnp.where(loop.is_running, token, 0)),
            logprobs=loop.logprobs.at[:, loop.step].set(jnp.where(loop.is_running, logprob, 0)),
            is_running=loop.is_running & ~is_end,
        )

    def turn(loop: Loop) -> Loop:
        last = lax.dynamic_index_in_dim(loop.token_ids, loop.step - 1, axis=1)
        hidden, cache = _forward(model, params, last, loop.cache, prompt_len + loop.step - 1)
        logits = read_out(model.config, head_params(params), hidden[:, -1])
        return draw(loop._replace(cache=cache), logits)

    shape = (num_prompts, model.config.num_kv_heads, prompt_len + max_new_tokens, model.config.head_dim)
    dtype = params["embed_tokens"]["embedding"].dtype
    key_shape = (*shape[:2], shape[3], shape[2]) if transposed_keys else shape
    empty = tuple((jnp.zeros(key_shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.config.num_layers))
    hidden, cache = _forward(model, params, prompt_ids, empty, 0)
    logits = jnp.repeat(read_out(model.config, head_params(params), hidden[:, -1]), num_samples, axis=0)
    cache = jax.tree.map(lambda x: jnp.repeat(x, num_samples, axis=0), cache)
    outputs = (num_rows, max_new_tokens)
    is_running = jnp.ones(num_rows, jnp.bool_)
    start = Loop(jnp.int32(0), cache, jnp.zeros(outputs, jnp.int32), jnp.zeros(outputs, jnp.float32), is_running)
    end = lax.while_loop(lambda loop: (loop.step < max_new_tokens) & loop.is_running.any(), turn, draw(start, logits))
    by_prompt = (num_prompts, num_samples)
    is_real = jnp.cumsum(jnp.isin(end.token_ids, jnp.array(eos_ids, jnp.int32)), axis=1) == 0
    lengths = jnp.minimum(is_real.sum(axis=1, dtype=jnp.int32) + 1, max_new_tokens)
    return functional.Rollout(
        token_ids=end.token_ids.reshape(*by_prompt, -1),
        logprobs=end.logprobs.reshape(*by_prompt, -1),
        lengths=lengths.reshape(by_prompt),
        is_finished=~end.is_running.reshape(by_prompt),
    )


def _forward(
    model: CausalLM, params: Params, token_ids: Int32[Array, "R T"], cache: Cache, start: Any
) -> tuple[Float[Array, "R T D"], Cache]:
    """Hidden states of T more tokens of each row, from position `start` on, and the cache with their KV."""
    config = model.config
    positions = jnp.broadcast_to((start + jnp.arange(token_ids.shape[1], dtype=jnp.int32))[None, :], token_ids.shape)
    (rope,) = position_tables(config, positions)
    x: Any = model.apply({"params": embed_params(params)}, token_ids, positions, method="embed")
    layers = []
    for i, kv in enumerate(cache):
        layer = params[f"layers_{i}"]
        attended, kv = _attend(config, layer["self_attn"], _norm(config, layer["input_layernorm"], x), rope, kv, start)
        layers.append(kv)
        x = x + attended
        x = x + _mlp(layer["mlp"], _norm(config, layer["post_attention_layernorm"], x))
    return x, tuple(layers)


def _norm(config: ModelConfig, params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + config.norm_eps)
    return normed.astype(x.dtype) * params["scale"][None, None, :]


def _mlp(params: Params, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
    gate, up = x @ params["gate_proj"]["kernel"], x @ params["up_proj"]["kernel"]
    return (jax.nn.silu(gate) * up) @ params["down_proj"]["kernel"]


def _attend(
    config: ModelConfig, params: Params, x: Float[Array, "R T D"], rope: Any, kv: tuple[Array, Array], start: Any
) -> tuple[Float[Array, "R T D"], tuple[Array, Array]]:
    """Over all positions that there is room for, those behind a token masked out."""
    num_rows, length, _ = x.shape
    q, k, v = (
        (x @ params[name]["kernel"]).reshape(num_rows, length, -1, config.head_dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = apply_rope(q, rope), apply_rope(k, rope)
    transposed = kv[0].shape != kv[1].shape
    keys, values = (jnp.asarray(x.swapaxes(1, 2), kv[1].dtype) for x in (k, v))
    if transposed:
        all_keys = lax.dynamic_update_slice(kv[0], keys.swapaxes(2, 3), (0, 0, 0, start))
    else:
        all_keys = lax.dynamic_update_slice(kv[0], keys, (0, 0, start, 0))
    all_values = lax.dynamic_update_slice(kv[1], values, (0, 0, start, 0))
    seen_keys, seen_values, form = all_keys, all_values, "rkds" if transposed else "rksd"
    if length > 1:  # the prompts see themselves alone: the rest of the room is empty yet
        seen_keys, seen_values, form = keys, values, "rksd"
    q = q.reshape(num_rows, length, config.num_kv_heads, -1, config.head_dim).transpose(0, 2, 3, 1, 4)
    # The query heads of a KV head and the tokens are the rows of one product.
    flat = q.reshape(num_rows, config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum(f"rkqd,{form}->rkqs", flat, seen_keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(*q.shape[:-1], -1) * config.head_dim**-0.5
    position = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, :]
    visible = position <= (start + jnp.arange(length, dtype=jnp.int32))[:, None]
    weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -jnp.inf), axis=-1).astype(values.dtype)
    flat = weights.reshape(*flat.shape[:-1], -1)
    out = jnp.einsum("rkqs,rksd->rkqd", flat, seen_values, preferred_element_type=jnp.float32)
    out = out.reshape(q.shape).transpose(0, 3, 1, 2, 4).reshape(num_rows, length, -1).astype(x.dtype)
    return out @ params["o_proj"]["kernel"], (all_keys, all_values)
