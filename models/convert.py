"""Turns any checkpoint that loads into a folder of `pagedjax.save`, or of Hugging Face's layout. Works on the host."""

from pathlib import Path

import jax

from pagedjax.models.decoder import CausalLM
from pagedjax.models.folders import check_free
from pagedjax.models.hf_export import export_hf
from pagedjax.models.load import load_checkpoint
from pagedjax.models.orbax_checkpoint import save
from pagedjax.models.quantization import quantization_of

FORMATS = ("orbax", "safetensors")


def convert(
    source: str | Path,
    path: str | Path,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    quantize_embeddings: bool = False,
    format: str = "orbax",
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Reads `source`, what `pagedjax.load` takes, and writes it to the folder `path` in one of FORMATS.

    `dtype` is that of the written weights; None keeps the checkpoint's own (float32 for a quantised GGUF file);
    `quantization` and `quantize_embeddings` are those of `load`, for Orbax alone. The weights stay in the memory of the
    host, so a model may be larger than the device. Raises ValueError as `load` and `save`.
    """
    if format not in FORMATS:
        raise ValueError(f"format: got {format!r}, expected one of {', '.join(FORMATS)}")
    kind = quantization_of(quantization, quantize_embeddings)
    if kind is not None and format != "orbax":
        raise ValueError(
            f"quantization: got {quantization!r} with format={format!r}, expected None: only Orbax holds int8"
        )
    check_free(path, overwrite and format == "orbax")  # before minutes are spent on loading
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        config, params, tokenizer = load_checkpoint(source, dtype, progress, quantization=kind)
        if format == "orbax":
            save(path, CausalLM(config), params, tokenizer, overwrite=overwrite)
        else:
            export_hf(path, config, params, tokenizer)
