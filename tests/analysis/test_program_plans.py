"""In: programs whose cost is not that of a plain training step. Out: what their plans
move, and how often; no plan gathers anything for want of a rule.
"""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import programs
import pytest
from plan_helpers import QUICK, Sharded, cpu_mesh, shard, shard_fn

from shardfn._api import planner, report_methods
from shardfn._core.sent_bytes import sent

pytestmark = pytest.mark.standard_promotion


def of_program(name: str) -> Sharded:
    return shard(programs.get(name), cpu_mesh(8), min_size=8)


def moved(sharded: Sharded, path: str) -> Counter[str]:
    """Runs per step of each operation on the leaves whose path starts with `path`."""
    found: Counter[str] = Counter()
    for c in sharded.plan.collectives:
        if c.path.startswith(path):
            found[c.op] += c.times or 1
    return found


@pytest.mark.parametrize("name", ["evaluation", "sampling"])
def test_decoding_gathers_each_layer_and_no_cache(name: str) -> None:
    """Per token and layer every weight once; the table, which all share, once in all.

    A cache has the rows of the batch in dimension 2 and stays where it is.
    """
    sharded = of_program(name)
    rounds = 2 * 6 if name == "evaluation" else 2
    for leaf in ("q", "k", "v", "o", "dense/0/w", "dense/1/w"):
        counts = moved(sharded, f"layers/{leaf}")
        # A while loop counts as one iteration.
        assert set(counts) == {"all_gather"} and counts["all_gather"] <= rounds
    assert moved(sharded, "table") == {"all_gather": 1}
    assert {c.op for c in sharded.plan.collectives} == {"all_gather", "all_reduce"}
    gathered = [c for c in sharded.plan.collectives if c.op == "all_gather"]
    assert all(c.path for c in gathered)


def test_per_example_gradients_move_parameters_alone() -> None:
    plan = of_program("per_example_conv").plan
    assert {c.op for c in plan.collectives} == {
        "all_gather",
        "psum_scatter",
        "all_reduce",
    }
    assert plan.wire_bytes < 2 * plan.parameter_bytes


def test_given_microbatches_gather_and_scatter_once() -> None:
    """Weights leave the loop over microbatches, gradients are summed in it."""
    program = programs.get("accumulate_given")
    sharded = shard(program, cpu_mesh(8), min_size=8, batch_spec=program.batch_spec)
    assert moved(sharded, "0/w") == {"all_gather": 1, "psum_scatter": 1}
    assert moved(sharded, "1/w") == {"all_gather": 1, "psum_scatter": 1}


def test_an_iterative_solver_moves_what_it_solves_for() -> None:
    """Each iteration sums one product; the batch's features stay."""
    plan = of_program("inner_solver").plan
    loops = [c for c in plan.collectives if c.times is None]
    assert loops and all(c.shape == (5, 5) and c.op == "all_reduce" for c in loops)


@pytest.mark.parametrize("name", ["newton_schulz", "shampoo", "opt_muon"])
def test_matrix_updates_move_one_matrix_at_a_time(name: str) -> None:
    sharded = of_program(name)
    largest = max(x.size for x in jax.tree.leaves(sharded.state))
    sizes = [jnp.zeros(c.shape).size for c in sharded.plan.collectives]
    assert max(sizes) <= largest


def test_muon_holds_no_more_than_momentum() -> None:
    """Its products need whole matrices, but no two for longer than a product."""

    def memory(layers: int, make: Callable[[], optax.GradientTransformation]) -> int:
        tx = make()
        shapes = [(64, 128) if i % 2 == 0 else (128, 64) for i in range(layers)]
        params = [jnp.zeros(shape) for shape in shapes]
        opt = jax.eval_shape(tx.init, params)

        def step(state, x):
            def loss_fn(params):
                h = x
                for w in params:
                    h = jnp.tanh(h @ w)
                return (h**2).mean()

            params, opt = state
            grads = jax.grad(loss_fn)(params)
            updates, opt = tx.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt), {}

        sharded = shard_fn(step, cpu_mesh(8), (), (16, 64), min_size=64)
        lowered = sharded.step.lower((params, opt), sharded.batch)
        compiled = lowered.compile(compiler_options=QUICK)
        return compiled.memory_analysis().temp_size_in_bytes

    def per_layer(make: Callable[[], optax.GradientTransformation]) -> float:
        return (memory(12, make) - memory(4, make)) / 8

    momentum = per_layer(lambda: optax.sgd(0.1, momentum=0.9))
    assert per_layer(lambda: optax.contrib.muon(1e-2)) <= 1.05 * momentum


@pytest.mark.parametrize(
    "name, options",
    [
        ("llama_scan_remat", {}),
        ("llama_scan_remat", {"prefetch": 1, "bucket_bytes": 2**12}),
        ("loops_and_branches", {}),
    ],
)
def test_choices_count_the_bytes_that_the_plan_says(name, options, monkeypatch) -> None:
    """As whole plans are compared by, to choose what stays; lines are rounded."""
    found = []

    def describe(planned):
        found.append(planned)
        return planner.describe(planned)

    monkeypatch.setattr(report_methods, "describe", describe)
    plan = shard(programs.get(name), cpu_mesh(8), min_size=8, **options).plan
    (planned,) = found
    counted = sent(planned.program, planned.body, planned.axes)
    assert abs(counted.bytes - plan.wire_bytes) <= sum(
        c.times or 1 for c in plan.collectives
    )
