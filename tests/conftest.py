"""How every test runs: on the CPU unless the user says otherwise, strict about dtypes and shapes, quick if repeated."""

import gc
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# In the environment, so that the subprocesses of tests inherit them too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "test-programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

# Two thirds of a compilation are LLVM's optimisations and MLIR. Without them the machine code is another, and slow on
# large arrays. The last flag is one of jaxlib 0.10 alone; others end the process at what they do not know.
if os.environ.get("QUICK_TO_COMPILE") == "1" and os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10.")
    )
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"

import hypothesis
import jax

# A plugin may have imported jax before the environment was set.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update(
    "jax_persistent_cache_min_compile_time_secs", float(os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"])
)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
# bf16 * f32 and [T] + [S, T] are mistakes until they are written out.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example of a test slow: neither a deadline nor the health check for speed says anything.
no_clock = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile(
    "quick", max_examples=25, derandomize=bool(os.environ.get("CI")), print_blob=True, **no_clock
)
hypothesis.settings.register_profile("deep", max_examples=1000, print_blob=True, **no_clock)
hypothesis.settings.load_profile("quick")  # --hypothesis-profile=deep comes later and wins


MAX_MEMORY_MAPS = 20_000
"""Of the 65,530 that Linux grants a process. A compiled program takes a hundred; beyond the limit XLA:CPU crashes."""


@pytest.fixture(autouse=True)
def _bounded_memory_maps() -> Iterator[None]:
    """Forgets compiled programs before there are too many; those that come again are read from the cache on disk."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where jax sees no NVIDIA GPU."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or any(device.platform == "gpu" for device in jax.devices()):
        return
    reason = f"needs an NVIDIA GPU; with JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} jax sees only {jax.devices()}"
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))
