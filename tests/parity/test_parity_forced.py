"""In: a plain program, and whether its weights stay where they are or move, whatever is
smaller. Out: it computes what one device does, each leaf of the state and of the
metrics after each of two steps, over two to eight devices.

Runs ten programs; `SHARDFN_FORCED=1` runs all, which takes ten minutes on two cores.
"""

import os
import warnings
from typing import Any

import jax
import numpy as np
import programs
import pytest
from programs._data import ROWS
from sharded_and_plain import plain_init, shard_program
from tiers import tiered

from shardfn.testing import assert_same
from shardfn.testing._compare import snapshot

pytestmark = pytest.mark.standard_promotion
STEPS = 2
# One for each library, and for loops, experts, lookups and odd sizes.
QUICK = """
conv_group_norm experts_ragged gpt_scan_remat haiku_state loops_and_branches lstm
nnx_split_merge size_17 state_of_everything vocab_101
""".split()

NAMES = programs.names() if os.environ.get("SHARDFN_FORCED") else QUICK
# Where weights move in a loop over time or layers, and rows in ragged groups, others
# test.
ELSEWHERE = (
    {"lstm", "experts_ragged", "gpt_scan_remat"} if NAMES is QUICK else set[str]()
)
# Of sixteen rows and no other number.
SIXTEEN = """
accumulate_given accumulate_scan adversarial contrastive decompositions_per_row
diffusion dropout_raw_key_in_batch evaluation policy_minibatches q_learning
random_augment random_loops sampling vision_transformer
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_all_stay_change_no_result(name: str) -> None:
    program = programs.get(name)
    count = devices(program)
    check(program, count, ROWS // count * count, stationary=True)


@pytest.mark.parametrize("name", tiered(NAMES, {*NAMES} - ELSEWHERE))
def test_weights_that_all_move_change_no_result(name: str) -> None:
    """Where the default moves them all, it is the same plan, which others run."""
    program = programs.get(name)
    if plan(program) != plan(program, stationary=False):
        check(program, 8, ROWS, stationary=False)


def devices(program: programs.Program) -> int:
    """From two to eight, by turns; the batch is cut to rows that they divide."""
    counts = (2, 4, 8) if program.name in SIXTEEN else range(2, 9)
    return counts[programs.names().index(program.name) % len(counts)]


def mesh_of(count: int) -> jax.sharding.Mesh:
    return jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])


def plan(program: programs.Program, **options: Any) -> str:
    step = shard_program(program, mesh_of(8), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return str(
            step.plan(
                jax.eval_shape(lambda: plain_init(program.name)), program.batch(0)
            )
        )


def check(program: programs.Program, count: int, rows: int, **options: Any) -> None:
    """Runs the step over so many devices, and the plain one on the same rows."""
    step, plain_step = (
        shard_program(program, mesh_of(count), **options),
        jax.jit(program.step),
    )
    state = plain = plain_init(program.name)
    for k in range(STEPS):
        batch = jax.tree.map(lambda x: x[:rows] if np.ndim(x) else x, program.batch(k))
        with warnings.catch_warnings():  # most weights are smaller than what moves then
            warnings.simplefilter("ignore", UserWarning)
            state, metrics = step(state, batch)
        plain, expected = plain_step(plain, batch)
        at = f"{program.name} over {count} devices, {options}, step {k + 1}"
        assert_same(snapshot(expected), metrics, f"{at}, metrics", tol=program.tol)
        assert_same(
            snapshot(plain),
            step.unshard(state),
            f"{at}, state",
            tol=program.tol,
            ignore=[n.pattern for n in program.noisy],
            weak_types=False,
        )
