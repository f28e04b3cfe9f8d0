"""One call from a path or name to everything that a model needs: its config, parameters and tokenizer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from gguf import GGUFReader
from transformers import PreTrainedTokenizerBase

from pagedjax.models.catalogue import resolve
from pagedjax.models.config import ModelConfig, Quantization, check_float_dtype
from pagedjax.models.config_file import CONFIG_NAME, read_config
from pagedjax.models.decoder import CausalLM
from pagedjax.models.families import config_from_hf, family_of
from pagedjax.models.gguf_loader import config_from_gguf, iter_gguf_tensors, metadata_value, open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.placement import Placement, build_params
from pagedjax.models.quantization import quantization_of, quantize_params
from pagedjax.models.safetensors_loader import iter_tensors, read_json, stored_dtype
from pagedjax.models.tokenizer import eos_token_ids, has_tokenizer, load_tokenizer
from pagedjax.models.weights import Params, is_ignorable


class Checkpoint(NamedTuple):
    """A loaded model."""

    config: ModelConfig
    """Its `eos_token_ids` are the union of all places that name one (see `tokenizer.eos_token_ids`)."""
    params: Params
    """Nested dict of jax arrays, all of the requested dtype but those of int8 kernels."""
    tokenizer: PreTrainedTokenizerBase | None
    """None when the checkpoint comes without one: then prompts are token ids."""


class Header(NamedTuple):
    """What a checkpoint says of itself before any tensor is read."""

    path: Path
    config: ModelConfig
    """As the files have it: a tokenizer may know more ids that end a text."""
    reader: GGUFReader | None = None
    """The open file, if it is one of GGUF."""
    quantization: Quantization | None = None
    """What is in int8 already."""


def load(
    name_or_path: str | Path,
    dtype: str = "auto",
    progress: bool = False,
    sharding: Placement | None = None,
    *,
    quantization: str | None = None,
    quantize_embeddings: bool = False,
) -> tuple[CausalLM, Params, Any]:
    """A Flax module, its params as a plain pytree, and its tokenizer (None if the checkpoint has none).

    `name_or_path` is a folder with safetensors, one of `pagedjax.save`, a .gguf file, a name of the catalogue
    ("smollm2-135m-instruct") or a hub id; "auto" is float32 on a CPU and bfloat16 on a GPU. Each array goes straight to
    its `sharding`: a `jax.sharding.Sharding` for all, a function of (path, shape) that gives one, such as of
    (("layers_0", "mlp", "up_proj", "kernel"), (576, 1536)), or a tree of them like the params'; None is the default
    device.

    With quantization="int8" every dense kernel is quantised as it is loaded, and with `quantize_embeddings` the table
    and the head as well: see `models/quantization.py`. Params in int8 are not for training.

    `model.apply({"params": params}, token_ids)` gives logits; `LLM(model, params=params, tokenizer=tokenizer)`
    samples from the same arrays.
    """
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    kind = quantization_of(quantization, quantize_embeddings)
    checkpoint = load_checkpoint(name_or_path, check_float_dtype(dtype), progress, sharding, kind)
    return CausalLM(checkpoint.config), checkpoint.params, checkpoint.tokenizer


def load_checkpoint(
    name_or_path: str | Path,
    dtype: str | None = None,
    progress: bool = False,
    sharding: Placement | None = None,
    quantization: Quantization | None = None,
) -> Checkpoint:
    """Loads a model folder, a .gguf file, a catalogue name or a hub id (see `catalogue.resolve`).

    `dtype` is what the parameters are converted to: "float32", "bfloat16", "float16", or None for the checkpoint's
    own. `sharding` says where they go: see `placement.sharding_for`; None is the default device. Raises ValueError for
    a checkpoint that is broken, incomplete or not implemented, naming what is wrong.
    """
    if dtype is not None:
        check_float_dtype(dtype)
    return load_tensors(read_header(name_or_path), dtype, progress, sharding, quantization)


def read_header(name_or_path: str | Path, *, with_tensors: bool = True) -> Header:
    """What `load_checkpoint` reads first. Without `with_tensors` nothing of a hub id is downloaded but its config, and
    `config.dtype` may not be that of the tensors. Raises ValueError as `load_checkpoint`."""
    path = resolve(name_or_path, with_tensors=with_tensors)
    if path.suffix == ".gguf" and path.is_file():
        reader = open_gguf(path)
        return Header(path, config_from_gguf(reader), reader)
    if (path / CONFIG_NAME).is_file():
        config, quantization = read_config(path)
        return Header(path, config, quantization=quantization)
    raw = read_json(path / "config.json")
    if with_tensors and not (raw.get("dtype") or raw.get("torch_dtype")):
        raw["dtype"] = stored_dtype(path)
    return Header(path, config_from_hf(raw))


def load_tensors(
    header: Header,
    dtype: str | None = None,
    progress: bool = False,
    sharding: Placement | None = None,
    quantization: Quantization | None = None,
) -> Checkpoint:
    """The rest of an opened checkpoint: see `load_checkpoint`."""
    path, config, reader, _ = header
    if (path / CONFIG_NAME).is_file():
        checkpoint = _load_own(path, config, dtype, progress, sharding)
        if quantization is not None:
            return checkpoint._replace(params=quantize_params(checkpoint.params, quantization))
        return checkpoint
    if reader is not None:
        tokenizer = None if metadata_value(reader, "tokenizer.ggml.model") is None else tokenizer_from_gguf(reader)
        config = replace(config, eos_token_ids=eos_token_ids(tokenizer, config.eos_token_ids))
        tensors = iter_gguf_tensors(reader, config)
    else:
        tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
        generation_file = path / "generation_config.json"
        generation_config = read_json(generation_file) if generation_file.is_file() else None
        config = replace(config, eos_token_ids=eos_token_ids(tokenizer, config.eos_token_ids, generation_config))
        tensors = iter_tensors(path, skip=partial(is_ignorable, config=config))
    tensors = family_of(config.model_type).split(tensors)
    params = build_params(config, tensors, dtype or config.dtype, progress, sharding, quantization)
    return Checkpoint(config, params, tokenizer)


def _load_own(
    path: Path, config: ModelConfig, dtype: str | None, progress: bool, sharding: Placement | None
) -> Checkpoint:
    """A folder of `pagedjax.save`, whose config has all the ids that end a text."""
    from pagedjax.models.orbax_checkpoint import TOKENIZER_FOLDER, restore_params  # slow to import

    folder = path / TOKENIZER_FOLDER
    tokenizer = load_tokenizer(folder) if folder.is_dir() else None
    return Checkpoint(config, restore_params(path, config, dtype, progress, sharding), tokenizer)
