"""In: every plain program. Out: over 8 devices it computes what it does over one, each
leaf of the state and of the metrics after each of five steps; and its first state.
"""

import jax
import programs
import pytest
from plan_helpers import walk
from sharded_and_plain import (
    assert_parity,
    init_as_plain,
    make_mesh,
    shard_program,
)
from tiers import tiered

pytestmark = pytest.mark.standard_promotion

# A primitive, loop or dtype of any other program is in one of these too.
# Quick runs have optimizers in test_optax.py, and views that are joined over the meshes
# of test_parity_meshes.py.
LOOPS = ("scan", "while", "cond")
QUICK = """
accumulate_given along_the_batch captured_arrays checked complex_weights conv_batch_norm
conv_group_norm custom_rules decompositions_per_row dropout_raw_key_in_batch
dropout_typed_key_in_batch equinox_batch_norm every_checkpoint_policy experts_ragged
fixed_point fourier frozen_masked gpt_scan_remat_bf16 host_call inner_solver kernel
loops_and_branches loss_scale_cond lstm masked_mean nnx_split_merge
ordinary_differential random_loops size_17 size_norms_of_padded sizes_from_data
small_leaves sparse_operand state_float16 state_is_one_array state_of_everything
state_transposed_moment vocab_101
""".split()
# One for each library, and for keys, tuples and odd sizes.
MADE = """
complex_weights dropout_raw_key_in_state equinox_batch_norm haiku_state nnx_split_merge
size_17 state_of_everything state_tuple_adam
""".split()


@pytest.mark.parametrize("name", tiered(programs.names(), QUICK))
def test_eight_devices_compute_what_one_does(name: str) -> None:
    assert_parity(programs.get(name), make_mesh("8"), born_sharded=False)


@pytest.mark.parametrize("name", tiered(programs.names(), MADE))
def test_eight_devices_make_the_state_that_one_does(name: str) -> None:
    program, mesh = programs.get(name), make_mesh("8")
    init_as_plain(program, shard_program(program, mesh), mesh)


@pytest.mark.exhaustive
def test_the_quick_programs_have_what_the_others_have() -> None:
    """Primitives, loops in loops, the dtypes that are read."""
    found = {name: _kinds(programs.get(name)) for name in programs.names()}
    quick = set().union(*(found[name] for name in QUICK))
    alone = {name: kinds - quick for name, kinds in found.items() if kinds - quick}
    assert not alone, "add one of these to QUICK"


def _kinds(program: programs.Program) -> set[tuple[str, ...]]:
    state = jax.eval_shape(program.init, jax.random.key(0))
    step = jax.make_jaxpr(program.step)(state, program.batch(0)).jaxpr
    found: set[tuple[str, ...]] = set()
    for eqn, _, inside in walk(step):
        name = eqn.primitive.name
        around = [loop for loop in inside if loop in LOOPS and name in LOOPS]
        found.add((name, *around[-1:]))
        found |= {("reads", str(getattr(x.aval, "dtype", ""))) for x in eqn.invars}
    return found
