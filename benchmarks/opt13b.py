"""The server that the PagedAttention paper measures most: OPT-13B on one A100 with 40 GB (arXiv 2309.06180, table 1).

Its steps take the time of a roofline, over one efficiency that all systems share: nothing here is measured on that GPU.
"""

from pagedjax.simulation.cost import StepLoad

NUM_SLOTS = 15_700
"""Tokens of KV that fit: "15.7K", table 1 (12 GB at 800 KB a token, section 3)."""
MAX_MODEL_LEN = 2048
"""What OPT takes."""
BLOCK_SIZE = 16
"""The paper's default, section 7.2."""
NUM_BLOCKS = NUM_SLOTS // BLOCK_SIZE

NUM_PARAMS = 12.85e9
"""facebook/opt-13b: 40 layers of width 5120, 50,272 tokens."""
WEIGHT_BYTES = 2 * NUM_PARAMS
"""fp16: 26 GB, table 1."""
KV_BYTES = 2 * 40 * 5120 * 2
"""Of one token: key and value, 40 layers, 5120 wide, fp16: 800 KB (section 3)."""
BANDWIDTH = 1.555e12
"""Bytes per second, datasheet of the A100 40 GB."""
FLOPS = 312e12
"""fp16 per second on tensor cores, same datasheet."""
EFFICIENCY = 0.48
"""Share of the roofline that a whole step reaches, the same for all systems: the one number that was chosen so that the
paged system keeps up with 2 requests a second, which the paper serves (figures 12a and 13a), and with little more."""


def step_seconds(load: StepLoad, efficiency: float = EFFICIENCY) -> float:
    """Weights and KV over the bandwidth, or products over their rate, whichever takes longer, over the efficiency. The
    operations of attention are left out: a percent of the others at these lengths."""
    memory = (WEIGHT_BYTES + KV_BYTES * load.num_context_tokens) / BANDWIDTH
    compute = 2 * NUM_PARAMS * load.num_tokens / FLOPS
    return max(memory, compute) / efficiency
