"""What the device is given for one step: frozen pytrees of int32 tables, padded to a bucket."""

from dataclasses import dataclass
from typing import no_type_check

import jax
import numpy as np
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
    attn: AttentionMetadata
    logits_indices: Int32[Array | np.ndarray, "S"]
    """Which token's hidden state each sampling request samples from; 0 for padding."""
    num_samples: Int32[Array | np.ndarray, ""]
    """Entries of `logits_indices` and `sampling` that are real."""
    sampling: SamplingInput
