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

GEMMA_2_9B = ModelConfig(
    model_type="gemma2",
    vocab_size=256000,
    hidden_size=3584,
    intermediate_size=14336,
    num_layers=42,
    num_heads=16,
    num_kv_heads=8,
    head_dim=256,
    max_position_embeddings=8192,
    norm_eps=1e-6,
    norm_offset=True,
    norm_placement="both",
    activation="gelu_tanh",
    layer_windows=(4096, None) * 21,
    attention_scale=256**-0.5,
    attention_soft_cap=50.0,
    final_soft_cap=30.0,
    embedding_scale=3584**0.5,
    tie_word_embeddings=True,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    dtype="bfloat16",
)
"""Half of its layers have a window: two groups of layers share each array of the pool."""
