"""`functional.generate` under vmap, in a scan, and over a mesh of eight devices: always the same samples."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from test_functional import PROMPTS, TOLERANCE, padded
from tiny_engine import MODEL, prompt_of, tiny_params

from pagedjax import functional

ROOT = Path(__file__).parents[1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "num_samples": 2, "temperature": 30.0, "block_size": 4}


def test_vmap_over_keys():
    ids, lens = padded(PROMPTS)
    keys = jax.random.split(jax.random.key(1), 3)
    free = functional.generate(MODEL, tiny_params(), ids, lens, keys[0], **OPTIONS)
    options = {**OPTIONS, "eos_ids": (int(free.token_ids[0, 0, 2]),)}  # so that the calls end at other steps

    def run(key):
        return functional.generate(MODEL, tiny_params(), ids, lens, key, **options)

    mapped = jax.jit(jax.vmap(run))(keys)
    for index, key in enumerate(keys):
        alone = run(key)
        assert np.array_equal(mapped.token_ids[index], alone.token_ids)
        assert np.array_equal(mapped.lengths[index], alone.lengths)
        np.testing.assert_allclose(mapped.logprobs[index], alone.logprobs, atol=TOLERANCE, rtol=0)
    assert not np.array_equal(mapped.token_ids[0], mapped.token_ids[1])


def test_vmap_over_prompts_and_keys():
    """Each call of the map has prompts of its own."""
    ids = np.array([[prompt_of(7, seed) for seed in pair] for pair in ((1, 2), (3, 4))], np.int32)
    lens = np.array([[7, 3], [5, 7]], np.int32)
    keys = jax.random.split(jax.random.key(2), 2)

    def run(ids, lens, key):
        return functional.generate(MODEL, tiny_params(), ids, lens, key, **OPTIONS).token_ids

    mapped = jax.vmap(run)(ids, lens, keys)
    for index in range(2):
        assert np.array_equal(mapped[index], run(ids[index], lens[index], keys[index]))


def test_in_a_scan_that_feeds_itself():
    """What one call samples is the prompt of the next: a rollout of several turns in one program."""
    keys = jax.random.split(jax.random.key(3), 3)
    options = {**OPTIONS, "num_samples": 1}
    first = np.array([prompt_of(6, seed=1), prompt_of(6, seed=2)], np.int32)

    def turn(prompt, key):
        new = functional.generate(MODEL, tiny_params(), prompt, None, key, **options).token_ids[:, 0]
        return new, new

    _, scanned = jax.jit(lambda prompt: jax.lax.scan(turn, prompt, keys))(jnp.asarray(first))
    prompt = first
    for index, key in enumerate(keys):
        prompt = functional.generate(MODEL, tiny_params(), prompt, None, key, **options).token_ids[:, 0]
        assert np.array_equal(scanned[index], prompt)


ON_EIGHT_DEVICES = """
import sys
sys.path.insert(0, "tests")
import jax
import jax.numpy as jnp
import numpy as np
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)

from pagedjax import functional
from test_functional import TOLERANCE
from tiny_engine import MODEL, prompt_of, tiny_params

lengths = (13, 1, 8, 4, 5, 9, 12, 3)
ids = np.array([prompt_of(13, seed) for seed in range(8)], np.int32)
lens = np.array(lengths, np.int32)
keys = functional.request_keys(range(8))
options = {"max_new_tokens": 6, "num_samples": 2, "temperature": 30.0, "block_size": 4}
plain = tiny_params()
expected = jax.tree.map(np.asarray, functional.generate(MODEL, plain, ids, lens, keys, **options))

assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

def check(rollout):
    assert np.array_equal(rollout.token_ids, expected.token_ids)
    assert np.array_equal(rollout.lengths, expected.lengths)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=TOLERANCE, rtol=0)

def columns(leaf):  # kernels by their outputs over two devices, the rest everywhere
    return NamedSharding(mesh, P(None, "model") if leaf.ndim == 2 else P())

@jax.jit
def run(params, ids, lens, keys):
    return functional.generate(MODEL, params, ids, lens, keys, **options)

sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, columns(leaf)), plain)
assert len(jax.tree.leaves(sharded)[0].sharding.device_set) == 8
check(run(sharded, ids, lens, keys))
print("tensor parallel")

by_rows = NamedSharding(mesh, P("data"))
batch = [jax.device_put(x, by_rows) for x in (ids, lens, keys)]
check(run(sharded, *batch))
print("both")

# Each device has its own rows, tables and pool, and none waits for another's.
everywhere = jax.device_put(plain, NamedSharding(mesh, P()))
rows = P(("data", "model"))
mapped = jax.shard_map(
    lambda params, ids, lens, keys: functional.generate(MODEL, params, ids, lens, keys, **options),
    mesh=mesh, in_specs=(P(), rows, rows, rows), out_specs=rows, check_vma=False,
)
check(jax.jit(mapped)(everywhere, ids, lens, keys))
print("data parallel")
"""


def test_params_and_batches_over_a_mesh():
    run = subprocess.run([sys.executable, "-c", ON_EIGHT_DEVICES], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "tensor parallel\nboth\ndata parallel\n"), run.stderr
