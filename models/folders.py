"""Folders that are there whole or not at all, and that never take the place of what somebody else wrote. Host only."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pagedjax.models.config_file import CONFIG_NAME


def check_free(path: str | Path, overwrite: bool) -> Path:
    """The full path of a folder that may be written: one that is new or empty, or with `overwrite` one of
    `pagedjax.save`. ValueError for any other."""
    path = Path(path).expanduser().resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        ours = (path / CONFIG_NAME).is_file()
        if not (overwrite and ours):
            hint = "overwrite=True replaces it" if ours else "it was not written by pagedjax.save"
            raise ValueError(f"path: got {path}, expected a new or an empty folder: {hint}")
    return path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, which takes its place at the end and is gone if anything was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        if path.exists():
            path.rename(Path(scratch) / "old")
        os.rename(new, path)
