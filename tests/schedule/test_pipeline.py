"""In: plans as `propagate` makes them, some written by hand. Out: the same moves, fewer
or elsewhere, and results equal to the last bit.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardfn
from shardfn._core.control import Control
from shardfn._core.phases import BACKWARD, FORWARD, Pass
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard
from shardfn._core.program import Node, Program
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._lowering import plan_jaxpr
from shardfn._propagation.propagate import propagate
from shardfn._schedule import loop_invariants
from shardfn._schedule.loop_invariants import hoist
from shardfn._schedule.pipeline import schedule
from shardfn._schedule.share_gathers import gathered_bytes, share_gathers
from shardfn._trace.jaxpr_to_program import make_program

AXES = Axes(("data",), (4,))
STORED: Sharding = (Split(0, stored=True),)
ROWS: Sharding = (Split(0),)
WHOLE: Sharding = (None,)


def reshards(plan: BodyPlan) -> list[Reshard]:
    return [s for s in plan.steps if isinstance(s, Reshard)]


# Hoist: tiny programs


def planned(function, *arguments) -> tuple[Program, BodyPlan]:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in arguments]
    program = make_program(jax.make_jaxpr(function)(*avals))
    required = [None] * len(program.outputs)
    return program, propagate(program, [s for _, s in arguments], required, AXES, 0)


def hoisted(program: Program, plan: BodyPlan) -> tuple[list[Reshard], Apply]:
    """What `hoist` puts in front of the only loop, and the loop."""
    (loop,) = [s for s in plan.steps if isinstance(s, Apply) and s.bodies]
    *moves, after = hoist(program, loop, Control(), itertools.count(9))
    assert all(isinstance(m, Reshard) for m in moves)
    assert isinstance(after, Apply) and after.node == loop.node
    return moves, after


def recurrent(w, u, x):
    def cell(h, _):
        return jnp.tanh(h @ w) @ u, None

    return lax.scan(cell, x, None, length=5)[0]


WEIGHTS = ((16, 16), STORED), ((16, 16), STORED), ((8, 16), ROWS)


def test_all_constants_of_a_loop_leave_it_together() -> None:
    program, plan = planned(recurrent, *WEIGHTS)
    (loop,) = [s for s in plan.steps if isinstance(s, Apply) and s.bodies]
    assert len(reshards(loop.bodies[0])) == 2, "gathered in every iteration"
    moves, after = hoisted(program, plan)
    assert [m.gathers_state for m in moves] == [True, True]
    assert reshards(after.bodies[0]) == []
    assert after.bodies[0].inputs[:2] == (WHOLE, WHOLE)
    assert after.operand_shardings[:2] == (WHOLE, WHOLE)
    assert after.operands[:2] == (moves[0].result, moves[1].result)
    assert len({m.result.version for m in moves} - {0, 1}) == 2, "versions of their own"
    assert [m.source for m in moves] == list(loop.operands[:2])


def test_big_constants_stay_in_the_loop(monkeypatch) -> None:
    program, plan = planned(recurrent, *WEIGHTS)
    bytes_of_one = 16 * 16 * 4
    monkeypatch.setattr(loop_invariants, "LOOP_BYTES", bytes_of_one)
    assert len(hoisted(program, plan)[0]) == 2, "an iteration holds one anyway"
    monkeypatch.setattr(loop_invariants, "LOOP_BYTES", bytes_of_one - 1)
    moves, after = hoisted(program, plan)
    assert moves == [], "neither leaves if the other is too big"
    assert len(reshards(after.bodies[0])) == 2


def test_what_is_not_constant_stays() -> None:
    """The weights of scanned layers differ in every iteration."""

    def layers(ws, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    stored_rows: Sharding = (Split(1, stored=True),)
    program, plan = planned(layers, ((5, 16, 16), stored_rows), ((8, 16), ROWS))
    moves, after = hoisted(program, plan)
    assert moves == [] and len(reshards(after.bodies[0])) == 1


def test_a_constant_that_is_also_used_as_it_is_stays() -> None:
    program, plan = planned(recurrent, *WEIGHTS)
    (loop,) = [s for s in plan.steps if isinstance(s, Apply) and s.bodies]
    (body,) = loop.bodies
    first = reshards(body)[0]
    body = dataclasses.replace(body, outputs=(*body.outputs, first.source))
    loop = dataclasses.replace(loop, bodies=(body,))
    moves, after = hoisted(program, dataclasses.replace(plan, steps=(loop,)))
    assert len(moves) == 1 and first in reshards(after.bodies[0])


def test_constants_leave_a_while_loop_too() -> None:
    def step(w, x):
        def body(carry):
            i, h = carry
            return i + 1, jnp.tanh(h @ w)

        return lax.while_loop(lambda c: c[0] < 3, body, (0, x))[1]

    program, plan = planned(step, ((16, 16), STORED), ((8, 16), ROWS))
    moves, after = hoisted(program, plan)
    assert [m.gathers_state for m in moves] == [True]
    assert [reshards(b) for b in after.bodies] == [[], []]


def test_a_branch_is_left_alone() -> None:
    def step(w, x):
        return lax.cond(True, lambda w, x: x @ w, lambda w, x: x, w, x)

    program, plan = planned(step, ((16, 16), STORED), ((8, 16), ROWS))
    (branch,) = [s for s in plan.steps if isinstance(s, Apply) and s.bodies]
    assert hoist(program, branch, Control(), itertools.count()) == [branch]


def test_nested_loops_hoist_to_the_top() -> None:
    def step(w, x):
        def outer(h, _):
            return lax.scan(lambda h, _: (h @ w, None), h, None, length=3)[0], None

        return lax.scan(outer, x, None, length=2)[0]

    program, plan = planned(step, ((16, 16), STORED), ((8, 16), ROWS))
    plan = schedule(program, plan, Control(), AXES)
    assert [m.gathers_state for m in reshards(plan)] == [True]
    (loop,) = [s for s in plan.steps if isinstance(s, Apply) and s.bodies]
    assert gathered_bytes(loop.bodies[0]) == 0


# Share: plans by hand. Value 0 is stored, 1 is stored too; node i makes value 10 + i.


def program_by_hand(backward: tuple[bool, ...]) -> Program:
    nodes = [
        Node(None, (), (10 + i,), during=Pass(BACKWARD if flag else FORWARD))  # pyright: ignore
        for i, flag in enumerate(backward)
    ]
    return Program((), (0, 1), (), tuple(nodes), (), frozenset())


def gather(value: int, version: int, rows: int = 8) -> Reshard:
    return Reshard(
        source=Ref(value),
        result=Ref(value, version),
        path=(ROWS, WHOLE),
        shape=(rows, 4),
        dtype="float32",
        itemsize=4,
        during=Pass(FORWARD),
        stored=True,
    )


def use(node: int, *operands: Ref, bodies: tuple[BodyPlan, ...] = (), times=1) -> Apply:
    whole = (WHOLE,) * len(operands)
    return Apply(node, "dot", operands, whole, (ROWS,), bodies=bodies, times=times)


def shared(*steps, backward=None, unit=False, outputs=()) -> BodyPlan:
    flags = backward or (False,) * 6
    plan = BodyPlan((STORED, STORED), steps, outputs, (WHOLE,) * len(outputs))
    return share_gathers(program_by_hand(flags), plan, Control(), unit=unit)


def test_near_uses_share_one_gather() -> None:
    steps = gather(0, 1), use(0, Ref(0, 1)), gather(0, 2), use(1, Ref(0, 2))
    plan = shared(*steps, outputs=(Ref(0, 2), None, Ref(11)))
    assert reshards(plan) == [gather(0, 1)]
    assert plan.steps[-1] == use(1, Ref(0, 1))
    assert plan.outputs == (Ref(0, 1), None, Ref(11)), "outputs are renamed too"


FAR = (
    gather(0, 1),
    use(0, Ref(0, 1)),
    gather(1, 1, rows=16),
    use(1, Ref(1, 1)),
    use(2, Ref(1, 1)),
    gather(0, 2),
    use(3, Ref(0, 2)),
)


def test_far_uses_repeat_the_gather_tied_to_the_backward_pass() -> None:
    plan = shared(*FAR, backward=(False, False, True, True))
    first, between, again = reshards(plan)
    assert (first, between) == (gather(0, 1), gather(1, 1, rows=16))
    assert dataclasses.replace(again, after=None) == gather(0, 2)
    assert again.after == Ref(12), "the result of the backward node before it"
    assert plan.steps[-1] == use(3, Ref(0, 2))


@pytest.mark.parametrize(
    "times, phases, gathers",
    [
        (8, ("forward", "forward"), 4),
        (10, ("forward", "forward"), 3),  # a tenth of what is in between, and no more
        (20, ("forward", "forward"), 2),
        (20, ("forward", "backward"), 4),
    ],
)
def test_one_pass_keeps_a_tenth_of_what_it_gathers_in_between(
    times, phases, gathers
) -> None:
    body = BodyPlan((STORED,), (gather(0, 1, rows=8),), (), ())
    first, last = (
        tuple(dataclasses.replace(gather(v, i), during=Pass(phase)) for v in (0, 1))
        for i, phase in enumerate(phases, 1)
    )
    plan = shared(
        *first,
        use(0, Ref(0, 1), Ref(1, 1)),
        use(1, bodies=(body,), times=times),
        *last,
        use(2, Ref(0, 2), Ref(1, 2)),
    )
    assert len(reshards(plan)) == gathers
    notes = [note.text for move in reshards(plan) for note in move.notes]
    decided = any("1/10 of what is gathered" in text for text in notes)
    assert notes and decided == (phases[0] == phases[1])


def test_a_repeated_gather_may_run_one_gather_ahead() -> None:
    """It waits for what existed at the gather before it, not for what came after."""
    forward = [(gather(v, 1), use(v, Ref(v, 1))) for v in range(5)]
    near = use(5, Ref(4, 1)), use(6, Ref(3, 1))
    far = [(gather(v, 2), use(9 - v, Ref(v, 2))) for v in (2, 1, 0)]
    steps = [*sum(forward, ()), *near, *sum(far, ())]
    plan = shared(*steps, backward=(False,) * 5 + (True,) * 5)
    assert [r.after for r in reshards(plan)[5:]] == [Ref(16), Ref(16), Ref(17)]


def test_a_unit_keeps_what_it_gathered() -> None:
    assert len(reshards(shared(*FAR, unit=True))) == 2


def test_what_is_no_gather_of_the_state_is_always_shared() -> None:
    steps = [
        dataclasses.replace(s, stored=False) if isinstance(s, Reshard) else s
        for s in FAR
    ]
    assert len(reshards(shared(*steps))) == 2


def test_a_use_in_between_keeps_a_gather_near() -> None:
    """A gather counts as far from the value's last use, not from its first."""
    steps = list(FAR)
    steps.insert(4, use(4, Ref(0, 1)))
    assert len(reshards(shared(*steps))) == 2


def test_gathers_in_bodies_are_distance_times_their_iterations() -> None:
    body = BodyPlan((STORED,), (gather(0, 1, rows=8),), (), ())
    for times, expected in ((1, 1), (2, 2), (None, 1)):
        steps = [
            gather(0, 1),
            use(0, Ref(0, 1)),
            use(1, bodies=(body,), times=times),
            gather(0, 2),
            use(2, Ref(0, 2)),
        ]
        assert len(reshards(shared(*steps))) == expected, times


# The whole schedule changes no bit


def _descend(loss_fn):
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, state, grads), loss

    return step


def unrolled(state, x):
    for w in state["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ state["layers"][0].T) ** 2)


def remat(state, x):
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    return jnp.mean(lax.scan(layer, x, state["stack"])[0] ** 2)


def rnn(state, x):
    first, second = state["layers"][:2]
    return jnp.mean(recurrent(first, second, x) ** 2)


def make_state():
    rng = np.random.default_rng(0)
    stack = jnp.asarray(rng.standard_normal((6, 16, 16)) / 4, jnp.float32)
    return {"layers": list(stack), "stack": stack * 0.5}


@pytest.mark.parametrize("loss_fn", [unrolled, remat, rnn])
def test_schedule_changes_no_bit(loss_fn, monkeypatch) -> None:
    step = _descend(loss_fn)
    x = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    results, bodies = [], []
    for passes in (schedule, lambda program, body, *_: body):
        monkeypatch.setattr(plan_jaxpr, "schedule", passes)
        run = shardfn.fully_shard(step, mesh, min_size=8)
        state, trail = run.shard(make_state()), []
        bodies.append(run.plan(state, x).body)
        for _ in range(3):
            state, loss = run(state, x)
            trail.append(jax.device_get((state, loss)))
        results.append(trail)
    assert bodies[0] != bodies[1], "the passes do something here"
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("prevent_cse", [False, True])
def test_a_remat_starts_with_the_backward_pass(prevent_cse: bool) -> None:
    """A barrier ties what a scanned layer computes again to the cotangent: without it,
    a compiler that peels an iteration off the loop computes that early. The weights are
    outside of it, unless the user asked for a barrier around all, so that their gathers
    may run ahead of the layer.
    """

    def step(w, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        def loss_fn(w):
            body = jax.checkpoint(layer, prevent_cse=prevent_cse)
            return jnp.sum(lax.scan(body, x, w)[0])

        return w - jax.grad(loss_fn)(w), ()

    sharded = shardfn.fully_shard(step, jax.make_mesh((4,), ("data",)), min_size=0)
    shapes = (3, 16, 16), (8, 16)
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    text = sharded.lower(*arguments).as_text()
    (barrier,) = [x for x in text.splitlines() if "optimization_barrier" in x]
    weight, rows = "tensor<4x16xf32>", "tensor<2x16xf32>"
    assert barrier.count(rows) == 2
    assert barrier.count(weight) == prevent_cse
