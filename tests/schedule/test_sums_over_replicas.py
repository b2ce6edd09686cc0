"""In: loops over layers whose gradients are scattered over one mesh axis, and summed
over another, such as replicas. Out: plans that leave the order of these sums to the
compiler, which delays what is summed over replicas, and waits for no reduce-scatter.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from jax import lax
from plan_helpers import Sharded, cpu_mesh, shard_fn

from shardfn._core import compat
from shardfn._core.plan import Apply
from shardfn._lowering.planned_program import Planned
from shardfn._schedule.delayed_sums import delayed_sums, leaves_sums
from shardfn.analysis import targets
from shardfn.storage import _stored_layout
from shardfn.testing import assert_same

LAYERS, WIDTH = 4, 64
BOTH = {"axis": ("replica", "data")}
PIPELINED = {"xla_gpu_pipeline_all_reduce", "xla_gpu_enable_pipelined_all_reduce"}


def train(dtype):
    """A step that trains layers, and computes in `dtype`."""

    def layer(h, w):
        up, down = (w[name].astype(dtype) for name in ("in", "out"))
        return h + jnp.tanh(h @ up) @ down, None

    def train_step(state, x):
        def loss_of(state):
            body = jax.checkpoint(layer, prevent_cse=False)
            h, _ = lax.scan(body, x.astype(dtype), state)
            return jnp.mean(h.astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    return train_step


def sharded(mesh, width: int, rows: int, dtype=jnp.bfloat16, **options) -> Sharded:
    state = {"in": (LAYERS, width, 4 * width), "out": (LAYERS, 4 * width, width)}
    return shard_fn(train(dtype), mesh, state, (rows, width), **options)


@contextmanager
def between_hosts() -> Iterator[None]:
    """Takes CPU devices for Hopper GPUs of two hosts."""
    with (
        mock.patch.object(compat, "hides_network", lambda device: True),
        mock.patch.object(_stored_layout, "slices_of", lambda devices: 2),
    ):
        yield


def planned(case: Sharded) -> Planned:
    states, batch = case.step._divide((case.state, case.batch), {})
    return case.step.programs.planned(*case.step.storage.leaves(states), batch)


def delayed(case: Sharded) -> int:
    """Bytes of a device that the compiler delays in the loops of a plan."""
    found, axes = planned(case), case.step.storage.axes
    return sum(
        delayed_sums(found.program.nodes[step.node], step, axes)
        for step in found.body.steps
        if isinstance(step, Apply)
    )


TERMS = 2 * WIDTH * 4 * WIDTH * 4
"""Bytes of a layer's two gradients in float32."""


@pytest.mark.parametrize(
    "sizes, options, hosts, over_others, bytes_delayed",
    [
        # Of what is scattered over four devices, a fourth is left to sum.
        ((2, 4), BOTH, True, True, TERMS // 4),
        # In one host, the first of two sums ends in its iteration.
        ((2, 4), BOTH, False, True, TERMS // 2 // 4),
        ((8,), {}, True, False, TERMS // 2),
    ],
)
def test_what_is_left_to_sum_over_replicas_is_delayed(
    sizes, options, hosts, over_others, bytes_delayed
) -> None:
    with between_hosts() if hosts else nullcontext():
        case = sharded(cpu_mesh(*sizes), WIDTH, 16, jnp.float32, **options)
        found = planned(case)
        axes = case.step.storage.axes
        assert leaves_sums(found.program, found.body, axes) == (hosts and over_others)
        assert delayed(case) == bytes_delayed


def test_a_step_is_the_plain_one() -> None:
    random = np.random.default_rng(0)
    with between_hosts():
        case = sharded(cpu_mesh(2, 4), WIDTH, 16, jnp.float32, **BOTH)
        state = {
            name: random.normal(0, 0.1, leaf.shape).astype("f4")
            for name, leaf in case.state.items()
        }
        batch = random.normal(size=case.batch.shape).astype("f4")
        given = case.step.shard(state)
        for number in range(3):
            state, loss = jax.jit(case.plain)(state, batch)
            given, found = case.step(given, batch)
            whole = case.step.unshard(given)
            assert_same((state, loss), (whole, found), f"step {number}")


@pytest.mark.parametrize("target", [aot("h100:16")])
def test_the_compiler_waits_for_no_reduce_scatter(target) -> None:
    """In turn, XLA made each of them synchronous, as a sum over replicas follows."""
    mesh = targets.mesh(target, ("replica", "data"), (2, 8))
    case = sharded(mesh, 2048, 16 * 4096, **BOTH)
    report = case.step.on(target, case.state, case.batch, mesh_shape=(2, 8))
    assert PIPELINED & {name for name, _ in report.compiler_options}
    assert report.verification.ok, report.verification.problems()
    assert "psum_scatter" not in {span.kind for span in report.timeline.alone}
    waits = report.timeline.exposed_by_op.get("psum_scatter", 0.0)
    assert waits < 0.02 * report.step_seconds  # in turn, 0.1
    over = {(s.kind, s.over) for s in report.timeline.links if s.bytes > 2**20}
    assert ("psum_scatter", ("NVLink",)) in over and (
        "all_reduce",
        ("network",),
    ) in over


@pytest.mark.parametrize("target", [aot("h100:16")])
def test_where_all_is_one_axis_nothing_is_asked_for(target) -> None:
    case = sharded(targets.mesh(target), 256, 16 * 64)
    report = case.step.on(target, case.state, case.batch)
    assert not PIPELINED & {name for name, _ in report.compiler_options}
