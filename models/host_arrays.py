"""Memory on the host that a CPU device takes as it is, where it would copy any other. Host only."""

import math

import numpy as np

ALIGNMENT = 64
"""Of addresses, in bytes: what XLA asks for on a CPU. numpy's own are multiples of 16."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As `np.empty`, at an aligned address."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
