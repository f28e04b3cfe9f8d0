"""The Python examples of the documentation run as they stand."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[1]


def blocks_of(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks_of("pallas_kernels/README.md"))
def test_the_kernels_by_themselves(block):
    names: dict = {}
    exec(block, names)
    assert names["out"].shape == (4, 6, 64)
    assert jnp.isfinite(names["out"]).all()
    assert (names["k_pool"] != 0).any()
