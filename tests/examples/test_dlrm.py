"""The recommendation example trains as without shardfn, its table in no collective."""

import dataclasses

import dlrm
import numpy as np
import pytest

pytestmark = pytest.mark.standard_promotion

TINY = dlrm.Flags(steps=4, batch_size=64, most=2000, log_every=2)


def test_the_losses_are_those_of_one_device(capsys):
    losses = dlrm.main(TINY)
    plain = dlrm.main(dataclasses.replace(TINY, plain=True))
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    assert len(losses) == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("step 0: loss 0.") and lines[0].endswith(" per second")


def test_no_table_moves(capsys):
    assert dlrm.main(dataclasses.replace(TINY, plan=True)) == []
    plan = capsys.readouterr().out
    rows = dlrm.table_rows(TINY.most)
    assert f"{rows}x{TINY.width}" not in plan and f" {rows} " not in plan
    (stays,) = (line for line in plan.splitlines() if line.startswith("stationary"))
    assert "'squares', 'table'" in stays
