"""Holds that the shape checks are on: a wrong shape, dtype or type anywhere in the package raises in tests."""

import importlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

PLANTED = """
from jaxtyping import Array, Float32, Int32

def gather(table: Float32[Array, "N D"], ids: Int32[Array, "T"]) -> Float32[Array, "T D"]:
    return table[ids]

def lies(x: Float32[Array, "T D"]) -> Float32[Array, "D T"]:
    return x
"""


@pytest.fixture(params=["pagedjax", "pagedjax.models", "pagedjax.serving", "pagedjax.pallas_kernels"])
def planted(request, tmp_path, monkeypatch):
    """A module under each part of the package, the symlinked folders included."""
    package = importlib.import_module(request.param)
    name = f"planted_{request.param.rpartition('.')[2]}"
    (tmp_path / f"{name}.py").write_text(PLANTED)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield importlib.import_module(f"{request.param}.{name}")
    del sys.modules[f"{request.param}.{name}"]


def test_a_right_call_passes(planted):
    assert planted.gather(jnp.zeros((5, 2)), jnp.zeros(3, jnp.int32)).shape == (3, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((jnp.zeros(5), jnp.zeros(3, jnp.int32)), id="shape"),
        pytest.param((jnp.zeros((5, 2)), jnp.zeros(3)), id="dtype"),
        pytest.param((np.zeros((5, 2), np.float32), jnp.zeros(3, jnp.int32)), id="numpy for jax"),
    ],
)
def test_a_wrong_argument_raises(planted, arguments):
    with pytest.raises(TypeCheckError):
        planted.gather(*arguments)


def test_a_wrong_result_raises(planted):
    with pytest.raises(TypeCheckError):
        planted.lies(jnp.zeros((2, 3)))
