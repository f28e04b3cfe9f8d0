"""Peak host memory while a model loads, beside its weights and its largest file, in each format and two dtypes.

    python benchmarks/loading_memory.py                      # SmolLM2 and a random model of 1.5 GB, as a table
    python benchmarks/loading_memory.py --model smollm2-135m-instruct --gigabytes 0

Each load is a process of its own, in which JAX has started, a tiny model has been loaded, and the model's tokenizer
has been loaded and dropped before the clock starts.
What is measured is the growth of the resident set (VmHWM after a reset of the mark, minus VmRSS before): everything
that the process holds, pages of mapped files and the buffers of libraries included. Linux only.
"""

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TINY = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
BIG = {
    **TINY,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
SHARDS = 5
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what pagedjax.load takes")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of the random model in float32; 0: none")
    parser.add_argument("--load", nargs=2, metavar=("PATH", "DTYPE"), help="measure this load alone and print JSON")
    args = parser.parse_args()
    if args.load:
        print(json.dumps(measure(Path(args.load[0]), args.load[1])))
        return
    with tempfile.TemporaryDirectory(prefix="loading-memory-") as scratch:
        sources = formats_of(args.model, Path(scratch) / "model")
        if args.gigabytes:
            sources += random_model(args.gigabytes, Path(scratch) / "random")
        print(f"pagedjax {version('pagedjax')}, jax {version('jax')}, orbax-checkpoint {version('orbax-checkpoint')}\n")
        print("| model | format | loaded as | weights, MB | largest file, MB | peak, MB | peak - weights | holds | s |")
        print("|---|---|---|--:|--:|--:|--:|---|--:|")
        for name, kind, path in sources:
            for dtype in DTYPES:
                print(row(name, kind, path, dtype), flush=True)


def row(name: str, kind: str, path: Path, dtype: str) -> str:
    """A line of the table, from a process of its own."""
    command = [sys.executable, __file__, "--load", str(path), dtype]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seen = json.loads(done.stdout)
    largest = largest_file(path)
    holds = "yes" if seen["peak"] <= seen["weights"] + largest else "no"
    weights, largest, peak = (round(value / 1e6) for value in (seen["weights"], largest, seen["peak"]))
    more = f"{peak - weights:+}"
    return f"| {name} | {kind} | {dtype} | {weights} | {largest} | {peak} | {more} | {holds} | {seen['s']:.1f} |"


def measure(path: Path, dtype: str) -> dict[str, Any]:
    """Loads a checkpoint on the CPU and says how far the resident set rose above where it was."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from pagedjax.models.load import load_checkpoint

    with tempfile.TemporaryDirectory() as scratch:  # imports, libraries' threads, the first programs
        warm_up(path, dtype, Path(scratch))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    before, start = status("VmRSS"), time.perf_counter()
    checkpoint = load_checkpoint(path, dtype)
    seconds, peak = time.perf_counter() - start, status("VmHWM") - before
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoint.params))
    return {"weights": weights, "peak": peak, "s": seconds}


def warm_up(path: Path, dtype: str, scratch: Path) -> None:
    from pagedjax.models.config_file import CONFIG_NAME
    from pagedjax.models.convert import convert
    from pagedjax.models.load import load_checkpoint
    from pagedjax.models.tokenizer import load_tokenizer

    with contextlib.suppress(ValueError):  # it may have none
        load_tokenizer(path / "tokenizer" if (path / CONFIG_NAME).is_file() else path)
    write_folder(scratch / "tiny", TINY, shards=1)
    load_checkpoint(scratch / "tiny", dtype)
    if (path / CONFIG_NAME).is_file():
        convert(scratch / "tiny", scratch / "own")
        load_checkpoint(scratch / "own", dtype)


def status(field: str) -> int:
    """Bytes of a field of this process in Linux' books."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def largest_file(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max(file.stat().st_size for file in files)


def formats_of(model: str, folder: Path) -> list[tuple[str, str, Path]]:
    """A model as it is, as safetensors in one file and as a folder of `pagedjax.save`, in f32."""
    from pagedjax.models.catalogue import resolve
    from pagedjax.models.convert import convert

    path = resolve(model)
    convert(model, folder / "own")
    convert(model, folder / "hf", format="safetensors")
    kind = "GGUF" if path.suffix == ".gguf" else "as it is"
    return [(model, kind, path), (model, "safetensors", folder / "hf"), (model, "Orbax", folder / "own")]


def random_model(gigabytes: float, folder: Path) -> list[tuple[str, str, Path]]:
    """A model of about so many bytes, random, in f32 in all formats and in bf16 as safetensors."""
    from pagedjax.models.convert import convert

    layers = max(1, round((gigabytes * 1e9 - 4 * 2 * 32000 * 1024) / (4 * 15.2e6)))
    raw = {**BIG, "num_hidden_layers": layers}
    name = f"random, {layers} layers"
    one = write_folder(folder / "one", raw, shards=1)
    sharded = write_folder(folder / "sharded", raw, shards=SHARDS)
    narrow = write_folder(folder / "narrow", {**raw, "torch_dtype": "bfloat16"}, shards=SHARDS)
    gguf = write_gguf(folder / "model.gguf", raw)
    convert(one, folder / "own")
    return [
        (name, "safetensors", one),
        (name, f"safetensors, {SHARDS} files", sharded),
        (name, f"safetensors in bf16, {SHARDS} files", narrow),
        (name, "GGUF, Q8_0", gguf),
        (name, "Orbax", folder / "own"),
    ]


def random_tensors(raw: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of the model in f32, in the files' layout."""
    from pagedjax.models.families import config_from_hf
    from pagedjax.models.weights import expected_tensors

    rng = np.random.default_rng(0)
    expected = expected_tensors(config_from_hf(raw))
    shapes = {name: shape[::-1] if transpose else shape for name, (_, shape, transpose) in expected.items()}
    return {name: rng.random(shape, np.float32) - np.float32(0.5) for name, shape in shapes.items()}


def write_folder(folder: Path, raw: dict[str, Any], shards: int) -> Path:
    """A Hugging Face folder with random weights in so many files of about equal size."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(raw)
    if raw["torch_dtype"] == "bfloat16":
        tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map, total, done = {}, sum(array.nbytes for array in tensors.values()), 0
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    for name, array in tensors.items():
        part = min(done * shards // total, shards - 1)
        parts[part][name] = array
        weight_map[name] = f"model-{part}.safetensors"
        done += array.nbytes
    for part, held in enumerate(parts):
        save_file(held, folder / f"model-{part}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_gguf(path: Path, raw: dict[str, Any]) -> Path:
    """A GGUF file with random weights, matrices as Q8_0."""
    import gguf
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, raw["num_hidden_layers"])
    for name, array in random_tensors(raw).items():
        kind = gguf.GGMLQuantizationType["Q8_0" if array.ndim == 2 else "F32"]
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        writer.add_tensor(stored, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    main()
