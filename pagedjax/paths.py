"""Where pagedjax keeps files on this machine. Host only."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: `$PAGEDJAX_CACHE`, else `$XDG_CACHE_HOME/pagedjax`, else `~/.cache/pagedjax`.

    It is not created here; an environment variable that is set but empty counts as unset.
    """
    if own := os.environ.get("PAGEDJAX_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pagedjax"
    return Path.home() / ".cache" / "pagedjax"
