"""What scheduling asks of a GPU: blocks in pinned memory and back, decodes in one program, steps launched ahead.

The same is tested on a CPU in test_swap and test_multi_step.
"""

import jax
import numpy as np
import pytest
from tiny_engine import POOL_BLOCKS, assert_greedy, fill_pool, greedy, pool_of, prompt_of, run_all, tiny_engine

pytestmark = pytest.mark.gpu


def test_blocks_go_to_pinned_memory_and_come_back():
    engine = tiny_engine(preemption="swap", num_swap_blocks=POOL_BLOCKS)
    runner = engine.runner
    rng = np.random.default_rng(0)
    runner.kv_cache = jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(size=x.shape), x.dtype), runner.kv_cache)
    before, blocks = pool_of(engine), rng.permutation(np.arange(1, POOL_BLOCKS + 1)).tolist()
    runner.swap_out(dict(zip(range(1, POOL_BLOCKS + 1), blocks, strict=True)))
    assert all(block.sharding.memory_kind == "pinned_host" for block in runner.host_pool._blocks.values())
    fill_pool(engine, np.nan)
    runner.swap_in(dict(zip(blocks, range(1, POOL_BLOCKS + 1), strict=True)))
    for old, new in zip(before, pool_of(engine), strict=True):
        np.testing.assert_array_equal(new[1:], old[1:])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(("num_decode_steps", "async_scheduling"), [(1, False), (1, True), (4, False), (4, True)])
def test_every_way_to_schedule_gives_the_best_tokens(num_decode_steps, async_scheduling, preemption):
    with jax.default_matmul_precision("highest"):
        engine = tiny_engine(
            12,
            preemption=preemption,
            num_swap_blocks=16,
            num_decode_steps=num_decode_steps,
            async_scheduling=async_scheduling,
        )
        fill_pool(engine, np.nan)
        prompts = {str(i): prompt_of(5 + 2 * i, i) for i in range(5)}
        for name, prompt in prompts.items():
            engine.add_request(prompt, greedy(12), name)
        outputs = run_all(engine)
        assert engine.stats().num_preemptions > 0
        for name, prompt in prompts.items():
            assert_greedy(prompt, outputs[name].outputs[0].token_ids)
