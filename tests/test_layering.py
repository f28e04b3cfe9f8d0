"""Holds the layers: who may import whom, what stays free of jax, and that the engine stays small enough to read."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("models", "serving", "pallas_kernels")  # top-level folders that are subpackages through symlinks
MAX_ENGINE_LINES = 2500

STDLIB = frozenset(sys.stdlib_module_names)
TEST_ONLY = frozenset({"torch", "accelerate", "beartype", "chex", "hypothesis", "pytest"})
DEVICE = frozenset({"jax", "jaxlib", "flax", "optax", "orbax"})


class Layer(NamedTuple):
    modules: str  # names or patterns under pagedjax; the longest that matches a module is its place
    only: frozenset[str] | None = None  # the third-party packages allowed; None: any
    never: frozenset[str] = frozenset()  # the third-party packages forbidden


# Low to high. A module imports from its own row and from the rows above it in this table, and never in a circle.
LAYERS = (
    Layer("pallas_kernels pallas_kernels.*", only=frozenset({"jax", "jaxtyping", "numpy"})),
    Layer(
        "paths models.checks models.config models.config_file models.host_arrays models.folders models.rope "
        "models.gguf_rope models.layer_groups models.families models.families.* models.catalogue",
        never=DEVICE,
    ),
    Layer(
        "model_input kv_cache blocks.host_pool beams.choose sampling.sampler sampling.logits sampling.logprobs "
        "sampling.decode_loop"
    ),
    Layer("models models.*"),
    Layer(
        "config outputs text text.detokenizer blocks blocks.allocator blocks.table "
        "sampling sampling.params sampling.checks sampling.processors "
        "beams beams.params beams.search",
        never=DEVICE,
    ),
    Layer("scheduling scheduling.* blocks.prefix_cache beams.groups", never=DEVICE),
    Layer("blocks.memory_map beams.rows sampling.edits sampling.extras sampling.log_entries", never=DEVICE),
    Layer("simulation simulation.*", never=DEVICE),
    Layer(
        "batch compilation_cache text.output_processor sampling.pipeline sampling.rows "
        "planning planning.memory planning.bounds planning.options"
    ),
    Layer("model_runner requests functional functional.*"),
    Layer("launch"),
    Layer("engine"),
    Layer("streaming scoring planning.*"),
    Layer("llm"),
    Layer(""),  # pagedjax itself: the public names, each imported when first asked for
    Layer("__main__ serving serving.*"),
)
PLACES = {
    f"pagedjax.{name}".rstrip("."): rank for rank, row in enumerate(LAYERS) for name in row.modules.split() or [""]
}


def rank_of(module: str) -> int | None:
    """The row of a module, or None if the table has no place for it."""
    matching = [pattern for pattern in PLACES if fnmatchcase(module, pattern)]
    return PLACES[max(matching, key=len)] if matching else None


def imports(tree: ast.AST) -> set[str]:
    """The absolute names that a file imports, inside functions too; `from a import b` gives a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return names


def resolve(name: str, modules: set[str]) -> str:
    """The module that holds `name`: a submodule itself, or the module in which it is a variable."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def violations(sources: dict[str, str]) -> list[str]:
    """Every breach of the layers in a package given as {module name: source}."""
    found = []
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = imports(ast.parse(source))
        rank = rank_of(module)
        if rank is None:
            found.append(f"{module} has no place in LAYERS")
            continue
        ours = {resolve(name, set(sources)) for name in names if name.split(".")[0] == "pagedjax"}
        edges[module] = ours - {module}
        for other in ours:
            other_rank = rank_of(other)
            if other_rank is not None and other_rank > rank:
                found.append(f"{module} imports upward: {other}")
        foreign = {name.split(".")[0] for name in names} - STDLIB - {"pagedjax", *FOLDERS, ""}
        only, never = LAYERS[rank].only, LAYERS[rank].never
        forbidden = foreign & (never | TEST_ONLY) if only is None else foreign - only
        found += [f"{module} must not import {name}" for name in sorted(forbidden)]
        found += short_names(module, names)
        if "__future__.annotations" in names:
            found.append(f"{module} has `from __future__ import annotations`, which switches the shape checks off")
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append("imports in a circle: " + " -> ".join(error.args[1]))
    return found


def short_names(module: str, names: set[str]) -> list[str]:
    """Imports that do not start from the package: relative ones, and the top-level folders by their short names."""
    wrong = sorted(name for name in names if name.split(".")[0] in ("", *FOLDERS))
    return [f"{module} imports {name}, not by its full name under pagedjax" for name in wrong]


def package_sources() -> dict[str, str]:
    """{module name: source} of the whole package, the symlinked folders included."""
    package = ROOT / "pagedjax"
    files = [*package.rglob("*.py")]  # which does not follow symlinks
    for folder in FOLDERS:
        files += (package / folder).rglob("*.py")
    sources = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = file.read_text()
    return sources


def host_modules() -> list[str]:
    """The modules that promise not to import jax, as far as they exist."""
    return sorted(name for name in package_sources() if (rank := rank_of(name)) is not None and LAYERS[rank].never)


def test_the_package_keeps_its_layers():
    assert violations(package_sources()) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_everyone_imports_by_the_full_name(folder):
    files = (ROOT / folder).rglob("*.py")
    assert [breach for file in files for breach in short_names(file.name, imports(ast.parse(file.read_text())))] == []


@pytest.mark.parametrize("module", host_modules())
def test_host_modules_do_not_load_jax(module):
    program = f"import sys, {module}; print([name for name in {sorted(DEVICE)} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("[]\n", "")


def test_the_engine_stays_small():
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / "pagedjax").glob("*.py"))
    assert lines < MAX_ENGINE_LINES


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_are_relative_symlinks(folder):
    link = ROOT / "pagedjax" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


PLANTED = {
    "upward": (
        "pagedjax.scheduling.scheduler",
        "from pagedjax.engine import LLMEngine",
        "imports upward: pagedjax.engine",
    ),
    "upward to a module": (
        "pagedjax.config",
        "from pagedjax.scheduling import scheduler",
        "imports upward: pagedjax.scheduling.scheduler",
    ),
    "upward inside a function": (
        "pagedjax.models.decoder",
        "def f():\n    import pagedjax.engine",
        "imports upward: pagedjax.engine",
    ),
    "the public face": ("pagedjax.config", "import pagedjax", "imports upward: pagedjax"),
    "kernels know nothing": ("pagedjax.pallas_kernels.op", "import pagedjax.paths", "imports upward: pagedjax.paths"),
    "jax on the host": ("pagedjax.scheduling.scheduler", "import jax.numpy as jnp", "must not import jax"),
    "flax in a config": ("pagedjax.models.config", "from flax import struct", "must not import flax"),
    "kernels use jax only": ("pagedjax.pallas_kernels.op", "import flax", "must not import flax"),
    "torch": ("pagedjax.models.loader", "def f():\n    import torch", "must not import torch"),
    "short name": ("pagedjax.engine", "import models", "imports models, not by its full name"),
    "short name of a module": ("pagedjax.engine", "from serving import app", "imports serving.app, not by its full"),
    "relative": (
        "pagedjax.engine",
        "from .scheduler import Scheduler",
        "imports .scheduler.Scheduler, not by its full",
    ),
    "annotations": ("pagedjax.engine", "from __future__ import annotations", "switches the shape checks off"),
    "unknown module": ("pagedjax.utils", "", "has no place in LAYERS"),
}


@pytest.mark.parametrize(("module", "source", "breach"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_breach_is_found(module, source, breach):
    package = dict.fromkeys(
        ["pagedjax", "pagedjax.engine", "pagedjax.scheduling.scheduler", "pagedjax.paths", "pagedjax.models.config"], ""
    )
    found = violations({**package, module: source})
    assert len(found) == 1
    assert breach in found[0]


def test_a_planted_circle_is_found():
    package = {
        "pagedjax.scheduling.request": "from pagedjax.scheduling.group import SequenceGroup",
        "pagedjax.scheduling.group": "from pagedjax.scheduling.request import Request",
    }
    assert [breach.split(":")[0] for breach in violations(package)] == ["imports in a circle"]


def test_a_good_package_passes():
    package = {
        "pagedjax": "import importlib",
        "pagedjax.models": "",
        "pagedjax.models.config": "from pagedjax.paths import cache_folder",
        "pagedjax.models.decoder": "import jax\nfrom flax import linen\nfrom pagedjax.models import config",
        "pagedjax.paths": "import os",
        "pagedjax.scheduling.scheduler": "import numpy as np\nfrom pagedjax.paths import cache_folder",
        "pagedjax.engine": "import jax\nfrom pagedjax.scheduling.scheduler import Scheduler",
        "pagedjax.serving.cli": "import pagedjax\nimport typer",
    }
    assert violations(package) == []
