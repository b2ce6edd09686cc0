"""In: unrolled layers, and how many units ahead to gather. Out: gathers that wait for
the unit so many before theirs, the same bits, and no more memory than these units'.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layered import LAYERS, ROWS, UNROLLED, train
from plan_helpers import cpu_mesh, emitted_moves, planned_moves, run, shard_fn

from shardfn._core.plan import Apply, Reshard
from shardfn.analysis import targets


def gathers_of(step: Any) -> list[Reshard]:
    """What a step gathers, itself or as a remat."""
    inside = step.bodies[0].steps if isinstance(step, Apply) and step.bodies else [step]
    return [s for s in inside if isinstance(s, Reshard) and s.gathers_state]


@pytest.mark.parametrize("lead", [1, 2])
def test_a_remat_gathers_so_many_layers_ahead(lead: int) -> None:
    """Its weights are outside of its barrier, and wait for an earlier cotangent."""
    options = dict(prefetch=lead, reshard_after_forward=True)
    case = shard_fn(train("unrolled_remat"), cpu_mesh(4), UNROLLED, ROWS, **options)
    body = case.plan.body
    units = [s for s in body.steps if isinstance(s, Apply) and gathers_of(s)]
    assert len(units) == LAYERS
    made = [set(s.imports) for s in units]
    assert all(len(tokens) == 1 for tokens in made)
    assert all(s.early for s in units)
    # What the unit `lead` before gets, this one's gathers wait for.
    for token, before in zip(made[lead:], units, strict=False):
        assert token <= set(before.operands)
    assert emitted_moves(case) == planned_moves(case.plan)


@pytest.mark.parametrize("kind", ["unrolled", "unrolled_remat"])
def test_order_changes_no_bit(kind: str) -> None:
    exact = {"xla_allow_excess_precision": False}
    outcomes = []
    for lead in (0, 1, 2):
        options = dict(prefetch=lead, compiler_options=exact)
        case = shard_fn(train(kind), cpu_mesh(4), UNROLLED, ROWS, **options)
        assert emitted_moves(case) == planned_moves(case.plan)
        outcomes.append(run(case, 1))
    jax.tree.map(np.testing.assert_array_equal, *outcomes[:2])
    jax.tree.map(np.testing.assert_array_equal, *outcomes[1:])


def test_a_weight_waits_for_the_weight_so_many_before() -> None:
    """Without remat; one in between by pattern."""
    options = dict(prefetch={"layers/*/up": 2, "layers/*/down": 1})
    case = shard_fn(train("unrolled"), cpu_mesh(4), UNROLLED, ROWS, **options)
    forward = [s for s in case.plan.body.steps if gathers_of(s)][: 2 * LAYERS]
    after = [s.after for s in forward if isinstance(s, Reshard)]
    assert after[:3] == [None] * 3, "the first three may be there from the start"
    assert after[3] == after[4] != after[5] and None not in after[3:]


def test_joined_weights_are_one_unit() -> None:
    options = dict(bucket_bytes=2**20, prefetch=1)
    case = shard_fn(train("unrolled"), cpu_mesh(4), UNROLLED, ROWS, **options)
    assert emitted_moves(case) == planned_moves(case.plan)
    joined: dict[Any, set[Any]] = {}
    for step in case.plan.body.steps:
        for move in gathers_of(step):
            joined.setdefault(move.together or move.result, set()).add(move.after)
    assert all(len(waits_for) == 1 for waits_for in joined.values())
    assert len(joined) < 2 * LAYERS


def test_what_is_never_gathered_takes_no_notice() -> None:
    whole = dict(shard=False)
    asked = dict(prefetch=2, gather_dtype="bfloat16", reshard_after_forward=False)
    plans = [
        shard_fn(train("unrolled"), cpu_mesh(4), UNROLLED, ROWS, **options).plan
        for options in (whole, whole | asked)
    ]
    assert plans[0].collectives == plans[1].collectives
    assert not any(c.op == "all_gather" for c in plans[0].collectives)


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
def test_gathers_overlap_and_hold_no_more_than_asked() -> None:
    """Layers so wide that XLA combines none of their gathers."""
    width, hidden, layers = 4096, 16384, 4

    def layer(h, w):
        up, down = (w[k].astype(jnp.bfloat16) for k in ("up", "down"))
        return h + jnp.tanh(h @ up) @ down

    def step(state, x):
        def loss_fn(state):
            h = x.astype(jnp.bfloat16)
            for w in state:
                h = jax.checkpoint(layer)(h, w)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), ()

    state = [{"up": (width, hidden), "down": (hidden, width)}] * layers
    temporary, overlapped = [], []
    for lead in (0, 1, 2):
        mesh = targets.mesh("h100:8")
        case = shard_fn(step, mesh, state, (512, width), prefetch=lead)
        compiled = case.compile()
        found: Any = case.plan.verify(compiled)
        assert found.ok, str(found)
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        overlapped.append(found.overlapped_bytes)
    unit = 2 * 2 * width * hidden
    assert overlapped[0] < overlapped[1]
    for lead, bytes_ in enumerate(temporary):
        assert bytes_ - temporary[0] <= lead * unit
