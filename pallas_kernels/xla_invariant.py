"""`xla` with one order of all sums: the same bits for a query, whatever else is computed with it. A CPU's.

XLA:CPU picks how it computes a product by its sizes. From some rows on, and with columns that fill its vectors, it
computes each row of a product in the same way, however many there are (docs/decisions.md): so small ones are padded.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pagedjax.pallas_kernels import xla

MIN_ROWS = 16
MIN_ROWS_OF_MANY_KEYS = 64
"""Above `FEW_KEYS` keys per product."""
FEW_KEYS = 128
COLUMNS = 64
"""They are padded to a multiple of that."""


def paged_attention(*args: Any, **options: Any) -> Float[Array, "T H D"]:
    """See `pagedjax.pallas_kernels.attention.paged_attention`."""
    return xla.paged_attention(*args, **options, arithmetic=xla.Arithmetic(_einsum, _sum))


def _einsum(
    form: str, rows: Float[Array, "G K M E"], columns: Float[Array, "G K C D"], **options: Any
) -> Float[Array, "G K M _"]:
    num_rows, axis = rows.shape[2], form.partition(",")[2].index(form[-1])
    num_keys, num_columns = columns.shape[2], columns.shape[axis]
    rows = _pad(rows, 2, max(MIN_ROWS if num_keys <= FEW_KEYS else MIN_ROWS_OF_MANY_KEYS, num_rows))
    columns = _pad(columns, axis, -(-num_columns // COLUMNS) * COLUMNS)
    return jnp.einsum(form, rows, columns, **options)[:, :, :num_rows, :num_columns]


def _sum(x: Float[Array, "G K M C"]) -> Float[Array, "G K M"]:
    """Halves are added to each other until one number is left."""
    x = _pad(x, 3, 2 ** (x.shape[3] - 1).bit_length())
    while x.shape[3] > 1:
        half = x.shape[3] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _pad(x: Array, axis: int, size: int) -> Array:
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])
