"""Where compiled programs are kept, and what happens where they cannot be."""

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest

from pagedjax import compilation_cache
from pagedjax.compilation_cache import MIN_FREE_BYTES, use_compilation_cache

CONFIG: Any = jax.config
OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class Usage(NamedTuple):
    free: int


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    """As in a process whose user has chosen no cache."""
    before: dict[str, Any] = {name: getattr(jax.config, name) for name in OPTIONS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "cache"))
    use_compilation_cache()
    assert CONFIG.jax_compilation_cache_dir == str(tmp_path / "cache" / "programs")
    assert CONFIG.jax_persistent_cache_min_compile_time_secs == 0
    assert list((tmp_path / "cache" / "programs").iterdir()) == []


def test_the_users_own_choice_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    use_compilation_cache()
    assert CONFIG.jax_compilation_cache_dir == str(tmp_path)


def test_a_full_disk_is_said_and_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation_cache.shutil, "disk_usage", lambda _: Usage(MIN_FREE_BYTES - 1))
    with pytest.warns(UserWarning, match=r"its disk has 64 MiB left.*set PAGEDJAX_CACHE to another folder"):
        use_compilation_cache()
    assert CONFIG.jax_compilation_cache_dir is None


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="Not a directory"):
        use_compilation_cache()
    assert CONFIG.jax_compilation_cache_dir is None


def test_a_disk_that_is_full_later_costs_no_output(tmp_path, monkeypatch):
    """JAX warns, and what was compiled is used."""
    from jax._src import lru_cache

    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path))
    use_compilation_cache()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lru_cache.LRUCache, "put", full)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert int(jax.jit(lambda x: x * 3 + 11)(4)) == 23
