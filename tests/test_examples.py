"""The programs in examples/ run, and what they show is so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import blocks_of

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_quickstart_is_the_readmes():
    """`test_docs` runs it."""
    assert blocks_of("README.md")[0] in (EXAMPLES / "quickstart.py").read_text()


@pytest.mark.slow
def test_logits_processors():
    program = [sys.executable, str(EXAMPLES / "logits_processors.py")]
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    texts = re.findall(r"--- (\w+)\n(.{50,}?)\n\n(?=---|cooled:)", run.stdout, re.DOTALL)
    assert [name for name, _ in texts] == ["unmarked", "marked", "cooled", "greedy", "contrastive"]
    assert len({text for _, text in texts}) == 5
    first, last, marked, unmarked = map(float, re.findall(r" (-?\d+\.\d)", run.stdout[run.stdout.rindex("cooled:") :]))
    assert first > last
    assert marked > 4
    assert abs(unmarked) < 3
