"""Keeps compiled programs on disk between runs, and goes on without where that cannot be."""

import shutil
import tempfile
import warnings

import jax

from pagedjax.paths import cache_dir

MIN_FREE_BYTES = 64 * 2**20
"""With less, an entry may be cut off by the end of the disk: JAX would warn of it, and not replace it, ever after."""


def use_compilation_cache() -> None:
    """Switches JAX's persistent compilation cache on, in pagedjax's cache folder, unless the user has chosen another.

    Warns, and leaves it off, if that folder cannot be written or its disk is nearly full.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    folder = cache_dir() / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        reason = f"its disk has {free / 2**20:.0f} MiB left" if free < MIN_FREE_BYTES else None
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = str(error)
    if reason is not None:
        warnings.warn(
            f"compiled programs are not kept in {folder}: {reason}. Every start will compile again; make room, or set "
            "PAGEDJAX_CACHE to another folder",
            stacklevel=3,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
