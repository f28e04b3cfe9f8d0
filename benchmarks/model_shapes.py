"""Models that are measured on random weights, by their shape alone."""

from pagedjax.models.config import ModelConfig
from pagedjax.models.rope import RopeConfig

LLAMA_3_8B = ModelConfig(
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
)
