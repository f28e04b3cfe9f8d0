"""Keeps XLA's CUDA plugin from saying at every start that there is no driver here."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drops what native code writes to stderr: the plugin does so before it reads TF_CPP_MIN_LOG_LEVEL."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
