"""In: steps whose gradients could be summed at once. Out: what lives while they wait is
counted, and they wait for each other only where less lives at once then.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import Sharded, cpu_mesh, shard_fn
from test_chain_reduce_scatters import LAYER, LAYERS, WIDTH, sums, train

from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn._schedule import pipeline
from shardfn._schedule.chain_reduce_scatters import (
    chain_reduce_scatters,
    scatters_alone,
)
from shardfn._schedule.heap import Heap
from shardfn._schedule.liveness import Liveness
from shardfn._schedule.open_order import open_order
from shardfn.analysis import targets

MIB = 2**20
DEVICES = 8
TERM = 2 * LAYER["up"][0] * LAYER["up"][1]
MORE = TERM - TERM // DEVICES
"""Bytes of a layer's larger gradients: each as a term, and beyond its sum's."""
FEW = 512
"""Rows, of which a layer's activations are less than its gradients."""
WIDE = (WIDTH, 2**17)
"""A weight that takes more, gathered, than all layers' gradients."""


def train_below_a_wide_weight():
    """The layers, and a frozen product above them, in which most lives at once."""

    def layer(h, w):
        up, down = (w[k].astype(jnp.bfloat16) for k in ("up", "down"))
        return h + jnp.tanh(h @ up) @ down

    def loss_fn(layers, wide, x):
        h = x.astype(jnp.bfloat16)
        for w in layers:
            h = jax.checkpoint(layer)(h, w)
        return jnp.mean(jnp.tanh(h @ wide.astype(jnp.bfloat16)).astype(jnp.float32))

    def step(state, x):
        grads = jax.grad(loss_fn)(state["layers"], state["wide"], x)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, state["layers"], grads)
        return state | {"layers": new}, ()

    return step


def below_a_wide_weight(mesh: Any) -> Sharded:
    layer = {name: LAYER[name] for name in ("up", "down")}
    state = {"layers": [layer] * LAYERS, "wide": WIDE}
    return shard_fn(train_below_a_wide_weight(), mesh, state, (FEW, WIDTH))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Program, BodyPlan, Axes]]:
    """What the search is given."""
    given: list[tuple[Program, BodyPlan, Axes]] = []
    search = pipeline.search_order

    def record(*args: Any) -> BodyPlan:
        given.append(args)
        return search(*args)

    monkeypatch.setattr(pipeline, "search_order", record)
    return given


def chained(case: Sharded) -> bool:
    return any(after for _, after, _ in sums(case.plan.body, {}))


def is_remat(program: Program, step: Any) -> bool:
    return isinstance(step, Apply) and program.nodes[step.node].kind == "remat"


def has_large_sum(program: Program, body: BodyPlan) -> bool:
    return any(scatters_alone(step, program) for step in body.steps)


@pytest.mark.standard_promotion
def test_terms_of_all_layers_wait_for_the_last(monkeypatch) -> None:
    given = recorded(monkeypatch)
    case = shard_fn(train(True), cpu_mesh(DEVICES), [LAYER] * LAYERS, (FEW, WIDTH))
    assert case.plan
    program, body, axes = given[-1]
    more = open_order(Liveness(program, body, axes, Heap()))
    layers = [
        at
        for at, step in enumerate(body.steps)
        if is_remat(program, step)
        and has_large_sum(program.nodes[step.node].bodies[0], step.bodies[0])
    ]
    assert len(layers) == LAYERS and len(more) == len(body.steps) + 1
    for done, at in enumerate(layers):
        assert more[at] == done * 2 * MORE
    assert more[layers[-1] + 1] == 0, "nothing is left to wait for"


@pytest.mark.standard_promotion
def test_sums_that_wait_for_each_other_keep_one_layers_terms(monkeypatch) -> None:
    given = recorded(monkeypatch)
    case = shard_fn(train(True), cpu_mesh(DEVICES), [LAYER] * LAYERS, (FEW, WIDTH))
    assert chained(case)
    program, _, axes = given[-1]
    live = Liveness(program, case.plan.body, axes, Heap())
    assert max(open_order(live)) <= 2 * MORE


@pytest.mark.standard_promotion
def test_sums_do_not_wait_where_most_lives_elsewhere() -> None:
    assert not chained(below_a_wide_weight(cpu_mesh(DEVICES)))


@pytest.mark.standard_promotion
def test_moves_within_a_device_take_nothing(monkeypatch) -> None:
    """A version that waits is the same memory."""
    given = recorded(monkeypatch)
    case = shard_fn(train(True), cpu_mesh(DEVICES), [LAYER] * 2, (FEW, WIDTH))
    assert case.plan
    program, body, axes = given[-1]
    made = Liveness(program, body, axes, Heap())
    (step, *_) = (s for s in body.steps if isinstance(s, Reshard) and len(s.path) > 1)
    tie = Reshard(
        source=step.result,
        result=type(step.result)(step.result.value, step.result.version + 50),
        path=step.path[-1:],
        shape=step.shape,
        dtype=step.dtype,
        itemsize=step.itemsize,
        during=step.during,
    )
    made.made[tie.result] = tie, made.size(step.result, step.path[-1])
    assert made.roots(tie.result) == made.roots(step.result)


@pytest.mark.aot("h100:8")
@pytest.mark.standard_promotion
@pytest.mark.parametrize("wide", [False, True])
def test_the_compiler_agrees(wide, monkeypatch) -> None:
    """A step takes more where no sum waits, but not where most lives elsewhere."""
    orders = {
        True: lambda program, body, axes: chain_reduce_scatters(program, body),
        False: lambda program, body, axes: body,
    }
    temporary = {}
    for waits, order in orders.items():
        monkeypatch.setattr(pipeline, "search_order", order)
        mesh = targets.mesh("h100:8")
        if wide:
            case = below_a_wide_weight(mesh)
        else:
            case = shard_fn(train(True), mesh, [LAYER] * LAYERS, (FEW, WIDTH))
        assert chained(case) == waits
        temporary[waits] = case.compile().memory_analysis().temp_size_in_bytes
    saved = temporary[False] - temporary[True]
    assert abs(saved) < 0.02 * temporary[True] if wide else saved > 2 * TERM
