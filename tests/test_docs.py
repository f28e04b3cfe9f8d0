"""The Python examples of the documentation run as they stand."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[1]


def blocks_of(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", blocks_of("pallas_kernels/README.md"))
def test_the_kernels_by_themselves(block):
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].shape == (4, 6, 64)
    assert jnp.isfinite(names["out"]).all()
    assert (names["k_pool"] != 0).any()


# By default a step has room for 256 requests and tokens: twenty programs for each of the model's parts, most of which
# no block of the README runs. test_smollm2_oracle fills larger steps of this model.
SMALLER = """
import pagedjax
pagedjax.LLM.__init__.__kwdefaults__.update(max_num_seqs=8, max_num_batched_tokens=64)
"""
CHECKS = """
assert [len(output.outputs[0].token_ids) for output in outs] == [16, 16]
assert len(answer) > 50
assert len(entry) in (5, 6)
assert scores[0].total > scores[1].total
assert len(printed) > 50
assert output.finished and [len(completion.token_ids) for completion in output.outputs] == [40, 40]
assert logits.shape[:2] == token_ids.shape
assert tokenizer.decode(int(logits[0, -1].argmax())) == " Paris"
"""


# Of those guides of whose blocks more is known than that they run.
GUIDES = {
    "docs/researchers.md": """
assert len(answers) == 4 and len(set(answers)) > 1
assert float(gap) < 1e-3
assert again.outputs[0].token_ids != first.token_ids or again.outputs[0].logprobs != first.logprobs
assert best is scores[0]
assert text.count("\\n2.") == 1
""",
    "docs/life_of_a_query.md": """
assert len(table) == 1
assert text.startswith(" Paris")
""",
}
WITH_BLOCKS = sorted(
    name
    for path in ROOT.glob("**/*.md")
    if not (name := str(path.relative_to(ROOT))).startswith((".", "pagedjax/")) and blocks_of(name)
)


def run_program(tmp_path: Path, *parts: str) -> str:
    """Blocks as one program with the model that they name, run as users do, without the type checks of tests, but with
    smaller steps."""
    program = "\n".join([SMALLER, *parts])
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_the_readme(tmp_path):
    assert "The capital of France is ->  Paris" in run_program(tmp_path, *blocks_of("README.md"), CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in WITH_BLOCKS if not name.endswith("README.md")])
def test_guides(name, tmp_path):
    run_program(tmp_path, *blocks_of(name), GUIDES.get(name, ""))


def test_every_block_is_run_and_every_link_leads_somewhere():
    assert {name for name in WITH_BLOCKS if name.endswith("README.md")} == {"README.md", "pallas_kernels/README.md"}
    assert set(GUIDES) <= set(WITH_BLOCKS)
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
