"""What the device is given for one step: frozen pytrees of int32 tables, padded to a bucket."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, no_type_check

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from pagedjax.pallas_kernels.metadata import AttentionMetadata


# No run-time check of the fields: JAX rebuilds pytrees with leaves that are no arrays (avals, shardings, None).
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInput:
    """How each of the requests that sample in this step does it. Padding entries are greedy."""

    temperature: Float32[Array | np.ndarray, "S"]
    """0 is greedy."""
    top_k: Int32[Array | np.ndarray, "S"]
    """0 keeps all tokens."""
    top_p: Float32[Array | np.ndarray, "S"]
    """1 keeps all tokens."""
    min_p: Float32[Array | np.ndarray, "S"]
    """0 keeps all tokens."""
    seed: UInt32[Array | np.ndarray, "S 2"]
    """The 64-bit seed as (high, low) halves."""
    sample_index: UInt32[Array | np.ndarray, "S"]
    """Which of the n completions this is: folded into the key first."""
    num_outputs: UInt32[Array | np.ndarray, "S"]
    """Tokens generated before this one: folded into the key second."""


@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelInput:
    """One step: T tokens of up to S requests, of which the first `num_samples` entries of the last two sample."""

    token_ids: Int32[Array | np.ndarray, "T"]
    positions: Int32[Array | np.ndarray, "T"]
    """Position of each token in its request; 0 for padding."""
    groups: tuple[AttentionMetadata, ...]
    """Where the KV is, for each group of layers: see `models.layer_groups`. They differ in slots and tables alone."""
    logits_indices: Int32[Array | np.ndarray, "S"]
    """Which token's hidden state each sampling request samples from; 0 for padding."""
    num_samples: Int32[Array | np.ndarray, ""]
    """Entries of `logits_indices` and `sampling` that are real."""
    sampling: SamplingInput

    @property
    def attn(self) -> AttentionMetadata:
        """The first group's: what is the same in all groups can be read here."""
        return self.groups[0]


Layout = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]
"""The tree of what was packed, and shape and dtype of each of its leaves. Hashable: part of a compiled program."""


def pack(inputs: Any) -> tuple[Int32[np.ndarray, " n"], Layout]:
    """A tree of host arrays as one array, so that it goes to the device in one transfer instead of one per leaf."""
    leaves, tree = jax.tree.flatten(inputs)
    flat = np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in leaves])
    return flat, (tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))


@partial(jax.jit, static_argnums=1)
def unpack(flat: Int32[Array | np.ndarray, " n"], layout: Layout) -> Any:
    """The tree that `pack` made `flat` and `layout` of, on the device."""
    tree, specs = layout
    leaves, start = [], 0
    for shape, dtype in specs:
        leaf = lax.slice_in_dim(flat, start, start + prod(shape)).reshape(shape)
        leaves.append(lax.bitcast_convert_type(leaf, dtype))
        start += prod(shape)
    return jax.tree.unflatten(tree, leaves)
