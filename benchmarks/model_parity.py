"""Logits of every family on tiny random models against transformers' eager attention: dense, and over paged blocks.

    python benchmarks/model_parity.py            # prints the table (needs torch)
    python benchmarks/model_parity.py --write    # and puts it into models/README.md

float32: the largest absolute error at any position. bfloat16: the root mean square of the error over that of the
logits, against transformers in float32 on the same rounded weights, with transformers' own in bfloat16 beside it.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import math
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.batch import padding_batch
from pagedjax.config import EngineConfig
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.models.config import ModelConfig
from pagedjax.models.decoder import CausalLM, Params, head_params, paged_step, read_out
from pagedjax.models.load import load_checkpoint
from pagedjax.pallas_kernels.metadata import AttentionMetadata

README = Path(__file__).parents[1] / "models" / "README.md"
START, END = "<!-- parity table -->", "<!-- end of the parity table -->"

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,  # no square: the scale of Gemma's embeddings is not exact
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN2 = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"model_type": "qwen2"}
GEMMA2 = {"model_type": "gemma2", **SIZES, "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 24}
GEMMA3 = {**GEMMA2, "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window_pattern": 3}
OPT = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 40,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "word_embed_proj_dim": 40,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 80}
CASES: dict[str, dict[str, Any]] = {
    "LLaMA": {"model_type": "llama", **SIZES},
    "LLaMA 3 (scaled rope)": {"model_type": "llama", **SIZES, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE},
    "SmolLM2 (tied)": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "Mistral (window 8)": {"model_type": "mistral", **SIZES, "sliding_window": 8},
    "Qwen2": QWEN2,
    "Qwen2 (a window in half of the layers)": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "Qwen3": {"model_type": "qwen3", **SIZES},
    "Gemma": {"model_type": "gemma", **SIZES},
    "Gemma 2": {**GEMMA2, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "Gemma 3": {
        **GEMMA3,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "GPT-2": GPT2,
    "GPT-2 (scores by layer, n_inner)": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 96},
    "OPT": OPT,
    "OPT 350M (projections, post-norm)": {**OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
}
CHUNKS = (7, 23, 1, 19, 10)
"""Of a prompt of 60 tokens."""
NUM_DECODES = 10
NUM_TOKENS = sum(CHUNKS) + NUM_DECODES
BLOCK_SIZE = 4


class Parity(NamedTuple):
    """The numbers of one row of the table."""

    largest: float
    """Of the oracle's logits."""
    dense: float
    paged: float
    """Largest absolute errors in float32."""
    bf16: float
    bf16_oracle: float
    """Relative root mean square errors in bfloat16, over paged blocks and of transformers."""


def oracle_for(raw: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of a config with random weights, in float32; norms and biases are random too."""
    torch = importlib.import_module("torch")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[raw["model_type"]](**raw)
    oracle = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    is_gemma = raw["model_type"].startswith("gemma")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            is_scale = ("norm" in name or "ln_" in name) and name.endswith("weight") and not is_gemma
            parameter.normal_(1.0 if is_scale else 0.0, 0.2, generator=generator)
    return oracle


def logits_of(oracle: Any, token_ids: np.ndarray) -> np.ndarray:
    """The oracle's f32[B, T, V]."""
    torch = importlib.import_module("torch")

    with torch.no_grad():
        return oracle(torch.from_numpy(token_ids)).logits.float().numpy()


def dense_logits(config: ModelConfig, params: Params, token_ids: np.ndarray) -> np.ndarray:
    """Ours of whole sequences."""
    logits: Any = jax.jit(CausalLM(config).apply)({"params": params}, jnp.asarray(token_ids, jnp.int32))
    return np.asarray(logits)


def paged_logits(
    config: ModelConfig,
    params: Params,
    token_ids: np.ndarray,
    chunks: Sequence[int] = CHUNKS,
    block_size: int = BLOCK_SIZE,
) -> np.ndarray:
    """Ours of one sequence, f32[T, V]: the prompt in chunks, then token by token.

    Every group of layers has blocks of its own in no order, out of a pool of NaN, and none before its window.
    """
    windows, num_groups = config.layer_groups.windows, len(config.layer_groups.windows)
    num_rows, max_chunk = -(-len(token_ids) // block_size), max(max(CHUNKS), *chunks)
    engine = EngineConfig(
        num_blocks=num_groups * num_rows,
        block_size=block_size,
        windows=windows,
        max_model_len=num_rows * block_size,
        max_num_seqs=1,
        max_num_batched_tokens=max_chunk,
    )
    blocks = np.random.default_rng(2).permutation(np.arange(1, engine.num_blocks + 1)).reshape(num_groups, num_rows)
    pool = _pool_of_nan(config, params, engine)
    logits, start = [], 0
    for num_new in (*chunks, *(1,) * (len(token_ids) - sum(chunks))):
        T = 1 if num_new == 1 else max_chunk
        batch = padding_batch(engine, T, T)
        positions = np.arange(start, start + num_new, dtype=np.int32)
        groups = []
        for meta, row, window in zip(batch.groups, blocks, windows, strict=True):
            table = np.where(np.arange(num_rows) <= positions[-1] // block_size, row, 0).astype(np.int32)
            if window is not None:
                table[: max(0, start - window + 1) // block_size] = 0
            slots = table[positions // block_size] * block_size + positions % block_size
            groups.append(_with_sequence(meta, slots, table, start + num_new))
        batch = dataclasses.replace(
            batch,
            token_ids=_padded(token_ids[positions], T),
            positions=_padded(positions, T),
            groups=tuple(groups),
        )
        hidden, pool = paged_step(config, params, batch, pool)
        logits.append(np.asarray(_read_out(config, head_params(params), hidden))[:num_new])
        start += num_new
    return np.concatenate(logits)


_read_out = jax.jit(read_out, static_argnums=0)


def _pool_of_nan(config: ModelConfig, params: Params, engine: EngineConfig) -> KVCache:
    cache = init_kv_cache(
        num_pools=config.layer_groups.num_pools,
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=params["embed_tokens"]["embedding"].dtype,
    )
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)


def _with_sequence(meta: AttentionMetadata, slots: np.ndarray, table: np.ndarray, context_len: int) -> Any:
    """The padding's metadata with one sequence in its first row."""
    tables, lens = np.zeros(meta.block_tables.shape, np.int32), np.zeros(meta.context_lens.shape, np.int32)
    tables[0, : len(table)], lens[0] = table, context_len
    loc = np.full(meta.query_start_loc.shape, len(slots), np.int32)
    loc[0] = 0
    slots = _padded(slots, len(meta.slot_mapping))
    return dataclasses.replace(meta, slot_mapping=slots, block_tables=tables, context_lens=lens, query_start_loc=loc)


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values.astype(np.int32), (0, length - len(values)))


def relative(error: np.ndarray, logits: np.ndarray) -> float:
    """Root mean square of the error over that of the logits."""
    return math.sqrt(np.mean(np.square(error)) / np.mean(np.square(logits)))


def random_ids(*shape: int) -> np.ndarray:
    """Token ids of the tiny vocabulary."""
    return np.random.default_rng(1).integers(3, 96, shape)


def parity(raw: dict[str, Any], folder: Path) -> Parity:
    """Measures one case; its checkpoint goes through `folder`."""
    torch = importlib.import_module("torch")

    token_ids = random_ids(1, NUM_TOKENS)
    oracle = oracle_for(raw)
    oracle.save_pretrained(folder)
    expected = logits_of(oracle, token_ids)
    config, params, _ = load_checkpoint(folder, dtype="float32")
    dense = dense_logits(config, params, token_ids)
    paged = paged_logits(config, params, token_ids[0])

    narrow = load_checkpoint(folder, dtype="bfloat16").params
    exact = logits_of(oracle.to(torch.bfloat16).float(), token_ids)
    theirs = logits_of(oracle.to(torch.bfloat16), token_ids)
    ours = paged_logits(config, narrow, token_ids[0])
    return Parity(
        largest=float(np.abs(expected).max()),
        dense=float(np.abs(dense - expected).max()),
        paged=float(np.abs(paged - expected[0]).max()),
        bf16=relative(ours - exact[0], exact),
        bf16_oracle=relative(theirs - exact, exact),
    )


def table() -> str:
    """The table as Markdown."""
    lines = [
        "| model | largest logit | f32, dense | f32, paged | bf16, paged | transformers in bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for name, raw in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = parity(raw, Path(folder))
        lines.append(
            f"| {name} | {row.largest:.1f} | {row.dense:.1e} | {row.paged:.1e} "
            f"| {100 * row.bf16:.2f} % | {100 * row.bf16_oracle:.2f} % |"
        )
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "transformers", "torch"))
    lines += [
        "",
        f"{NUM_TOKENS} positions each: {sum(CHUNKS)} in chunks of {', '.join(map(str, CHUNKS))}, then {NUM_DECODES} "
        f"decodes. {versions}, {platform.machine()} CPU.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into models/README.md")
    args = parser.parse_args()
    text = table()
    print(text)
    if args.write:
        before, _, rest = README.read_text(encoding="utf-8").partition(START)
        _, _, after = rest.partition(END)
        README.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
