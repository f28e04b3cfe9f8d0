"""Modules of `benchmarks` for tests: scripts, which import each other as neighbours."""

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def load(name: str) -> Any:
    """A module of `benchmarks`."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
