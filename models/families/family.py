"""What a family of models is to the loaders: how its configs are read and what its files call the parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedjax.models.checks import is_count, require
from pagedjax.models.config import MAX_LAYERS, ModelConfig, as_token_ids, head_dim_or_default

ACTIVATIONS = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. Its files' tensors are `prefix.layers.3.self_attn.q_proj.weight`, and where `names` has an entry for
    what this engine calls `self_attn.q_proj`, that entry stands instead."""

    model_types: tuple[str, ...]
    """As in `config.json`."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads a `config.json` in which every missing key has its default. ValueError for what is not implemented."""
    gguf_types: Mapping[str, str] = field(default_factory=dict)
    """Architectures of GGUF files to model types."""
    read_gguf: Callable[[Mapping[str, Any], Callable[[str], Any]], dict[str, Any]] = lambda fields, read: {}
    """What a GGUF file says of this family: the fields of a ModelConfig that are not Llama's, from those that all
    files state and a function that reads a key under the architecture's name (None if it is not there)."""
    text_models: Mapping[str, str] = field(default_factory=dict)
    """Model types whose text model stands under `text_config`: that one's own type."""
    prefix: str = "model"
    """Of everything but `lm_head`."""
    layers: str = "layers"
    """What holds the layers."""
    names: Mapping[str, str] = field(default_factory=dict)
    """This engine's names of modules (without their layer) to the files'. `module[part]` is a part of a module that
    holds several side by side: see `fused`."""
    transposes_kernels: bool = True
    """Kernels of layers are stored as [out, in], as torch's Linear has them."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of the files whose last axis holds several of this engine's, of equal size: the parts in order."""
    renames: tuple[tuple[str, str], ...] = ()
    """Beginnings of tensors' names that occur, and what stands there instead."""
    ignorable: str = "(?!)"
    """A regular expression of tensors that may lie in a file without being used: buffers, other modalities."""

    def file_name(self, path: tuple[str, ...]) -> str:
        """The name that files have for the parameter at `path`, such as ("layers_3", "mlp", "up_proj", "kernel")."""
        first, *rest, leaf = path
        leaf = "bias" if leaf == "bias" else "weight"
        if not rest:
            return f"{self.module_name(first)}.{leaf}"
        return f"{self.module_name('.'.join(rest), first.removeprefix('layers_'))}.{leaf}"

    def module_name(self, module: str, layer: str | None = None) -> str:
        """The name that files have for what this engine calls `module`, in a layer or beside the layers."""
        if module == "lm_head":
            return module
        inside = "" if layer is None else f"{self.layers}.{layer}."
        return f"{self.prefix}.{inside}{self.names.get(module, module)}"

    def split(self, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """A stream of a file's tensors as one of parameters in the file's layout, under the names of `file_name`."""
        for name, array in tensors:
            for old, new in self.renames:
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            stem, _, leaf = name.rpartition(".")
            parts = next((parts for module, parts in self.fused.items() if stem.endswith(module)), ())
            if parts and array.ndim and array.shape[-1] % len(parts) == 0:
                pieces = np.split(array, len(parts), axis=-1)
                yield from ((f"{stem}[{part}].{leaf}", piece) for part, piece in zip(parts, pieces, strict=True))
                del pieces
            else:
                yield name, array
            del array  # or it would be in memory beside the next


def sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a ModelConfig that most families' files hold under the same names."""
    num_heads, hidden_size = count(values, "num_attention_heads"), count(values, "hidden_size")
    has_head_dim, has_kv_heads = (values.get(key) is not None for key in ("head_dim", "num_key_value_heads"))
    head_dim = count(values, "head_dim") if has_head_dim else None
    return {
        "model_type": values["model_type"],
        "vocab_size": count(values, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": layer_count(values),
        "num_heads": num_heads,
        "num_kv_heads": count(values, "num_key_value_heads") if has_kv_heads else num_heads,
        "head_dim": head_dim_or_default(head_dim, hidden_size, num_heads),
        "max_position_embeddings": count(values, "max_position_embeddings"),
        "tie_word_embeddings": flag(values, "tie_word_embeddings"),
        "dtype": str(values["dtype"]).removeprefix("torch."),
        "eos_token_ids": as_token_ids(values["eos_token_id"], "eos_token_id"),
    }


def activation(values: Mapping[str, Any], key: str) -> str:
    """This engine's name of an activation; ValueError for one that it does not have."""
    known = isinstance(values[key], str) and values[key] in ACTIVATIONS
    require(known, key, values[key], f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[values[key]]


def count(values: Mapping[str, Any], key: str) -> int:
    """A value that is an int of at least 1; ValueError otherwise."""
    require(is_count(values[key]), key, values[key], "an int >= 1, of 64 bits at most")
    return values[key]


def layer_count(values: Mapping[str, Any], key: str = "num_hidden_layers") -> int:
    """The number of layers, small enough that lists of one entry each can be made; ValueError otherwise."""
    num_layers = count(values, key)
    require(num_layers <= MAX_LAYERS, key, num_layers, f"at most {MAX_LAYERS}")
    return num_layers


def flag(values: Mapping[str, Any], key: str) -> bool:
    """A value that is true or false, or null for false; ValueError otherwise."""
    require(values[key] is None or isinstance(values[key], bool), key, values[key], "true or false")
    return bool(values[key])


def windows_of(layer_types: Any, window: Any, num_layers: int) -> tuple[int | None, ...]:
    """`layer_windows` from `layer_types`, a list with a name for each layer, and `sliding_window`; empty if no layer
    has one. ValueError when a layer should have one and there is none."""
    require(window is None or is_count(window), "sliding_window", window, "an int >= 1, or null")
    known = isinstance(layer_types, list | tuple) and all(name in LAYER_TYPES for name in layer_types)
    require(known, "layer_types", layer_types, f"a list of {' and '.join(LAYER_TYPES)}")
    fits = len(layer_types) == num_layers
    require(fits, "layer_types", layer_types, f"one for each of the {num_layers} layers")
    lacking = window is None and "sliding_attention" in layer_types
    require(not lacking, "sliding_window", window, "an int >= 1 that is in use, as layer_types has sliding_attention")
    windows = tuple(window if name == "sliding_attention" else None for name in layer_types)
    return windows if any(window is not None for window in windows) else ()
