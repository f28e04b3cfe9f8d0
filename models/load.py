"""One call from a path or name to everything that a model needs: its config, parameters and tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from pagedjax.models.catalogue import resolve
from pagedjax.models.config import ModelConfig, check_float_dtype, config_from_hf
from pagedjax.models.gguf_loader import config_from_gguf, iter_gguf_tensors, metadata_value, open_gguf
from pagedjax.models.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.models.safetensors_loader import iter_tensors, read_json, stored_dtype
from pagedjax.models.tokenizer import eos_token_ids, has_tokenizer, load_tokenizer
from pagedjax.models.weights import Params, build_params


class Checkpoint(NamedTuple):
    """A loaded model."""

    config: ModelConfig
    """Its `eos_token_ids` are the union of all places that name one (see `tokenizer.eos_token_ids`)."""
    params: Params
    """Nested dict of jax arrays, all of the requested dtype."""
    tokenizer: PreTrainedTokenizerBase | None
    """None when the checkpoint comes without one: then prompts are token ids."""


def load_checkpoint(name_or_path: str | Path, dtype: str | None = None, progress: bool = False) -> Checkpoint:
    """Loads a model folder, a .gguf file, a catalogue name or a hub id (see `catalogue.resolve`).

    `dtype` is what the parameters are converted to: "float32", "bfloat16", "float16", or None for the checkpoint's
    own. Raises ValueError for a checkpoint that is broken, incomplete or not implemented, naming what is wrong.
    """
    if dtype is not None:
        check_float_dtype(dtype)
    path = resolve(name_or_path)
    return _load_gguf(path, dtype, progress) if path.suffix == ".gguf" else _load_folder(path, dtype, progress)


def _load_folder(folder: Path, dtype: str | None, progress: bool) -> Checkpoint:
    raw = read_json(folder / "config.json")
    if not (raw.get("dtype") or raw.get("torch_dtype")):
        raw["dtype"] = stored_dtype(folder)
    config = config_from_hf(raw)
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    generation_file = folder / "generation_config.json"
    generation_config = read_json(generation_file) if generation_file.is_file() else None
    config = replace(config, eos_token_ids=eos_token_ids(tokenizer, config.eos_token_ids, generation_config))
    params = build_params(config, iter_tensors(folder), dtype or config.dtype, progress)
    return Checkpoint(config, params, tokenizer)


def _load_gguf(path: Path, dtype: str | None, progress: bool) -> Checkpoint:
    reader = open_gguf(path)
    config = config_from_gguf(reader)
    tokenizer = None if metadata_value(reader, "tokenizer.ggml.model") is None else tokenizer_from_gguf(reader)
    config = replace(config, eos_token_ids=eos_token_ids(tokenizer, config.eos_token_ids))
    params = build_params(config, iter_gguf_tensors(reader, config), dtype or config.dtype, progress)
    return Checkpoint(config, params, tokenizer)
