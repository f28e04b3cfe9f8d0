"""What a model is, as numbers, validated once. Host only, no jax.

One dataclass describes the decoders of all families: what differs between them is a field here, read by the family's
file under `families/`. A setting that is not implemented is refused, never ignored: a model that runs with half of its
configuration gives fluent, wrong text.
"""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pagedjax.models.checks import is_count, is_positive, require
from pagedjax.models.layer_groups import LayerGroups, group_layers
from pagedjax.models.rope import RopeConfig

MAX_LAYERS, MAX_HEAD_DIM = 10_000, 65_536
"""Far beyond any model: what a broken file names is refused before lists and arrays of that length are made."""
FLOAT_DTYPES = ("float32", "bfloat16", "float16")
PLAIN_ROPE = RopeConfig()
CHOICES = {
    "norm": ("rms", "layer"),
    "norm_placement": ("pre", "post", "both"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu"),
    "position_embedding": ("rope", "learned"),
    "dtype": FLOAT_DTYPES,
}
FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "attention_out_bias",
    "mlp_bias",
    "qk_norm",
    "norm_offset",
    "final_norm",
    "gated_mlp",
    "attention_scale_by_layer",
)


class LayerKind(NamedTuple):
    """What differs between the layers of one model: layers of one kind share a compiled program."""

    window: int | None
    """How many tokens back, itself included, a token sees; None: all of them."""
    scale: float
    """Multiplies the attention scores."""


@dataclass(frozen=True)
class Quantization:
    """What of a model is in int8: every dense kernel, and maybe the embeddings."""

    embeddings: bool
    """Whether the embedding table and the head are."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder; the defaults are LLaMA's. Hashable: it is a static attribute of the flax module."""

    model_type: str
    """Hugging Face's name of it, which says the family: see `families`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Its own number: `num_heads * head_dim` need not be `hidden_size`."""
    max_position_embeddings: int
    """The longest context the model was made for, in tokens."""
    norm_eps: float
    """Added to the variance in every norm."""
    rope: RopeConfig = PLAIN_ROPE
    """Of all layers, or of those without a window where `local_rope` is given."""
    tie_word_embeddings: bool
    """The output head is the embedding table."""
    attention_bias: bool
    """q_proj, k_proj and v_proj have a bias."""
    attention_out_bias: bool
    """o_proj has a bias."""
    mlp_bias: bool
    """gate_proj, up_proj and down_proj have a bias."""
    qk_norm: bool
    """Queries and keys are RMS-normalised per head before rope (Qwen3, Gemma 3)."""
    dtype: str
    """The checkpoint's own float type: one of FLOAT_DTYPES."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a text."""

    norm: str = "rms"
    """"rms", or "layer" with a bias (OPT, GPT-2)."""
    norm_offset: bool = False
    """The weights of norms are stored as w where 1 + w multiplies (Gemma)."""
    norm_placement: str = "pre"
    """Of the norms of a layer: "pre" before attention and MLP; "post" after each has been added to the residual stream
    (OPT 350M); "both" before each and after it, before it is added (Gemma 2)."""
    final_norm: bool = True
    """A norm stands before the head."""
    activation: str = "silu"
    """Of the MLP: "silu", "gelu", "gelu_tanh" (its approximation with tanh) or "relu"."""
    gated_mlp: bool = True
    """The MLP multiplies two projections, of which one is activated (arXiv 2002.05202)."""
    position_embedding: str = "rope"
    """"rope", or "learned": a table of positions is added to the embeddings, and there is no context beyond it."""
    position_offset: int = 0
    """Rows of the table before that of position 0 (OPT: 2)."""
    local_rope: RopeConfig | None = None
    """Of the layers with a window, where it is another (Gemma 3)."""
    layer_windows: tuple[int | None, ...] = ()
    """How many tokens back, itself included, a token of each layer sees, None: all of them. Empty: no layer has one."""
    attention_scale: float | None = None
    """Multiplies the attention scores; None: head_dim ** -0.5."""
    attention_scale_by_layer: bool = False
    """The scores of layer i, from 0, are divided by i + 1 on top of that (GPT-2, for half precision)."""
    attention_soft_cap: float | None = None
    """Attention scores become cap * tanh(scores / cap) (Gemma 2, arXiv 2408.00118)."""
    final_soft_cap: float | None = None
    """The same for the logits."""
    embedding_scale: float | None = None
    """Multiplies the embeddings (Gemma: the root of hidden_size), rounded to their dtype first."""
    embedding_size: int | None = None
    """Width of embedding table and head where it is not hidden_size: then project_in and project_out lie between."""

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*counts, "head_dim", "max_position_embeddings", "embedding_width"):
            require(is_count(getattr(self, name)), name, getattr(self, name), "an int >= 1")
        for name, most in (("num_layers", MAX_LAYERS), ("head_dim", MAX_HEAD_DIM)):
            require(getattr(self, name) <= most, name, getattr(self, name), f"at most {most}")
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        require(is_positive(self.norm_eps), "norm_eps", self.norm_eps, "a finite number > 0")
        for name, choices in CHOICES.items():
            require(getattr(self, name) in choices, name, getattr(self, name), f"one of {', '.join(choices)}")
        for name in FLAGS:
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in ("attention_scale", "attention_soft_cap", "final_soft_cap", "embedding_scale"):
            value = getattr(self, name)
            require(value is None or is_positive(value), name, value, "a finite number > 0, or null")
        require(is_count(self.position_offset + 1), "position_offset", self.position_offset, "an int >= 0")
        ids_ok = all(isinstance(token, int) and token >= 0 for token in self.eos_token_ids)
        require(ids_ok, "eos_token_ids", self.eos_token_ids, "a tuple of ints >= 0")
        windows_ok = all(window is None or is_count(window) for window in self.layer_windows)
        require(windows_ok, "layer_windows", self.layer_windows, "ints >= 1, or null")
        fits = len(self.layer_windows) in (0, self.num_layers)
        require(fits, "layer_windows", self.layer_windows, f"one for each of the {self.num_layers} layers, or none")
        if self.position_embedding == "rope":
            require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rope rotates pairs)")
            for rope in (self.rope, self.local_rope):
                if rope is not None:
                    rope.inv_freq(self.head_dim)  # refuses factors of another length

    @property
    def embedding_width(self) -> int:
        """Width of the embedding table and of the head."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def narrowest(self) -> int:
        """Numbers per token of the narrowest array over whose rows the model takes sums."""
        return min(self.hidden_size, self.embedding_width, self.num_kv_heads * self.head_dim, self.vocab_size)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer is."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return tuple(
            LayerKind(window, scale / (i + 1) if self.attention_scale_by_layer else scale)
            for i, window in enumerate(self.layer_windows or (None,) * self.num_layers)
        )

    @cached_property
    def layer_groups(self) -> LayerGroups:
        """Which layers share block tables."""
        return group_layers(tuple(kind.window for kind in self.layer_kinds))

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """The names of a layer's norms, in order, without those of queries and keys: Hugging Face's."""
        return {
            "pre": ("input_layernorm", "post_attention_layernorm"),
            "post": ("self_attn_layer_norm", "final_layer_norm"),
            "both": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
        }[self.norm_placement]

    @property
    def longest_context(self) -> int:
        """The longest context, in tokens, that the model is made for: see `RopeConfig.longest_context`."""
        if self.position_embedding == "learned":
            return self.max_position_embeddings
        return self.rope.longest_context(self.max_position_embeddings)

    def check_context(self, max_model_len: int, allow_longer: bool) -> None:
        """Raises ValueError for a context that the model is not made for, unless it is allowed and has positions."""
        if max_model_len <= self.longest_context:
            return
        limit = f"max_model_len must be at most the model's {self.longest_context}, got {max_model_len}"
        if self.position_embedding == "learned":
            raise ValueError(f"{limit}; its positions are learned, and there are no others")
        if not allow_longer:
            raise ValueError(f"{limit}; allow_longer_context=True serves it all the same")

    def served_up_to(self, max_model_len: int) -> "ModelConfig":
        """The config of an engine that serves contexts of at most so many tokens; itself unless rope depends on it."""
        rope = self.rope.served_up_to(max_model_len)
        local_rope = self.local_rope and self.local_rope.served_up_to(max_model_len)
        is_same = (rope, local_rope) == (self.rope, self.local_rope)
        return self if is_same else dataclasses.replace(self, rope=rope, local_rope=local_rope)


def check_float_dtype(dtype: str) -> str:
    """`dtype` itself when it is one of FLOAT_DTYPES, else ValueError."""
    require(dtype in FLOAT_DTYPES, "dtype", dtype, f"one of {', '.join(FLOAT_DTYPES)}")
    return dtype


def head_dim_or_default(head_dim: int | None, hidden_size: int, num_heads: int) -> int:
    """`head_dim`, or `hidden_size / num_heads` when it is None; ValueError when that is not a whole number."""
    if head_dim is not None:
        return head_dim
    for name, value in (("hidden_size", hidden_size), ("num_attention_heads", num_heads)):
        require(is_count(value), name, value, "an int >= 1")
    whole = hidden_size % num_heads == 0
    require(whole, "hidden_size", hidden_size, f"a multiple of num_attention_heads = {num_heads}, or a head_dim")
    return hidden_size // num_heads


def as_token_ids(value: Any, field: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as they stand in configs, as a tuple of ints; ValueError otherwise."""
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    ok = all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in values)
    require(ok, field, value, "a token id, a list of token ids, or null")
    return tuple(values)
