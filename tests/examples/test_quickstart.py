"""The quickstart runs as a newcomer runs it, prints its plan, and its loss falls."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart.py"


def test_prints_the_plan_and_a_falling_loss():
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    plan, separator, steps = done.stdout.partition("step   0")
    assert separator and "all-gather" in plan.replace("_", "-")
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", steps)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2


def test_is_at_most_60_lines():
    assert len(SCRIPT.read_text().splitlines()) <= 60
