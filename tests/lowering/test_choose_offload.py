"""In: steps, and the bytes that they may take of a device. Out: the leaves that leave
for the host: no more than have to, moments first; states and reports that have them
there; errors where nothing can be chosen.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from plan_helpers import cpu_mesh

import shardfn
from shardfn._api.fit_offload import Built, fitting
from shardfn._core.limits import OFFLOAD_COMPILATIONS
from shardfn._core.memories import memory_of
from shardfn._core.offloading import MASTERS, MOMENTS, PARAMETERS, OffloadChoice
from shardfn.analysis._figures import Memory
from shardfn.analysis._offload_table import offload_table
from shardfn.storage.checkpoint import Checkpoints

KIB = 2**10
SIZES = {"a": (64, 32), "b": (64, 64), "n": ()}
"""On each of 8 devices: 1 KiB of `a` and 2 KiB of `b`."""


def create() -> Any:
    rng = np.random.default_rng(0)
    masters = {
        k: jnp.asarray(rng.integers(-4, 4, s), jnp.float32) for k, s in SIZES.items()
    }
    return {
        "weights": jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters),
        "masters": masters,
        "m": jax.tree.map(jnp.zeros_like, masters),
    }


def train(state: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        w = jax.tree.map(lambda w: w.astype(jnp.float32), weights)
        return jnp.sum(x @ w["b"] @ w["a"] * w["n"])

    grads = jax.grad(loss)(state["weights"])
    m = jax.tree.map(lambda m, g: 0.5 * m + g.astype(m.dtype), state["m"], grads)
    masters = jax.tree.map(lambda w, m: w - 2.0**-8 * m, state["masters"], m)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), masters)
    return {"weights": weights, "masters": masters, "m": m}, jnp.sum(x)


X = jnp.ones((8, 64))
MESH = cpu_mesh(8)


def sharded(offload: Any, **options: Any) -> Any:
    options = {"min_size": 16, "stationary": False} | options
    return shardfn.fully_shard(train, MESH, offload=offload, **options)


WHOLE = sharded("1GiB").plan(create(), X).offload
assert WHOLE is not None


def size_of(fewer: int) -> str:
    """The bound that is so many bytes below what the step takes."""
    assert WHOLE is not None
    return f"{(WHOLE.without - fewer) / KIB} KiB"


def test_a_plan_says_what_it_adds_for_holes() -> None:
    assert WHOLE is not None
    line = "with 50% more than lives at once, for the holes of the compiler's heap"
    assert line not in offload_table(WHOLE)
    assert line in offload_table(replace(WHOLE, holes=0.5))


def test_what_leaves_are_to_a_step() -> None:
    assert WHOLE is not None
    roles = {group.role: set(group.leaves) for group in WHOLE.groups}
    assert roles == {
        MOMENTS: {"m/a", "m/b"},
        MASTERS: {"masters/a", "masters/b"},
        PARAMETERS: {"weights/a", "weights/b"},
    }
    assert WHOLE.fits and WHOLE.options == {}


@pytest.mark.parametrize(
    "fewer, chosen",
    [
        (0, set()),
        (1, {"m/a"}),
        (KIB, {"m/a"}),
        (KIB + 1, {"m/b"}),
        (2 * KIB + 1, {"m/a", "m/b"}),
        (3 * KIB + 1, {"m/a", "m/b", "masters/a"}),
        (6 * KIB, {"m/a", "m/b", "masters/a", "masters/b"}),
    ],
)
def test_no_more_leaves_than_has_to(fewer: int, chosen: set[str], monkeypatch) -> None:
    monkeypatch.setattr("shardfn._schedule.host_transfers.HOST_BLOCK_BYTES", 1)
    plan = sharded(size_of(fewer)).plan(create(), X)
    found = plan.offload
    assert set(found.leaves) == chosen
    assert set(found.options) == chosen and found.fits
    assert {leaf.path for leaf in plan.on_host} == chosen


def test_a_plan_says_what_was_chosen_and_why() -> None:
    bound = size_of(2 * KIB)
    plan = sharded(bound).plan(create(), X)
    text = str(plan)
    assert "moments              3.0 KiB  2.0 KiB  m/b" in text, text
    assert f"(offload='{bound}')" in text
    assert f"offload='{bound}' stores it on the host: by the plan" in plan.explain(
        "m/b"
    )
    kept = plan.explain("m/a")
    assert "leaves it on the device: the step fits without, and of the moments" in kept
    with pytest.warns(shardfn.OffloadWarning) as caught:
        everything = sharded("1KiB").plan(create(), X)
    assert "which is still more than 1.0 KiB" in str(everything)
    assert (
        "bytes of each device by its plan, more than offload='1KiB' allows: 1024"
        in (str(caught[0].message))
    )


def test_states_are_stored_as_chosen(tmp_path) -> None:
    step, plain = sharded({"m": size_of(1)}), sharded(None)
    step.plan(step.abstract(create), X)
    state, expected = step.init(create), plain.init(create)
    for _ in range(2):
        kinds = {k: memory_of(x.sharding) for k, x in state["m"].items()}
        assert kinds == {"a": "host", "b": "device", "n": "device"}
        state, _ = step(state, X)
        expected, _ = plain(expected, X)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), expected)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(jax.eval_shape(create))
    assert memory_of(restored["m"]["a"].sharding) == "host"
    # What was chosen is how others name it.
    other = sharded(step.plan(state, X).offload.options)
    other(restored, X)


def test_a_call_chooses_for_a_state_that_is_not_stored_yet() -> None:
    step = sharded(size_of(1))
    state, _ = step(create(), X)
    assert memory_of(state["m"]["a"].sharding) == "host"
    larger, _ = step(state, jnp.ones((16, 64)))  # stored it stays
    assert memory_of(larger["m"]["a"].sharding) == "host"


@pytest.mark.parametrize("method", ["init", "shard", "shardings"])
def test_nothing_is_stored_before_it_is_chosen(method: str) -> None:
    step = sharded("auto")
    argument = create if method == "init" else create()
    with pytest.raises(shardfn.ShardingError) as caught:
        getattr(step, method)(argument)
    message = str(caught.value)
    assert "offload='auto' has not chosen a memory for state leaf 'm/a' yet" in message
    assert "step.plan(step.abstract(init_fn), batch)" in message


def test_devices_that_do_not_say_their_memory_need_a_bound() -> None:
    with pytest.raises(shardfn.ShardingError, match="has to know how much memory"):
        sharded("auto").plan(create(), X)


def test_one_step_has_one_bound() -> None:
    step = sharded({"m": "1GiB", "masters": "2GiB"})
    with pytest.raises(shardfn.ShardingError, match="different bounds, '1GiB' and"):
        step.plan(create(), X)


@pytest.mark.parametrize("value", ["70", "GiB", "70 gib", "-1GiB", "0GiB", "automatic"])
def test_other_sizes_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="'auto' or the bytes that a step may take"):
        sharded(value)


@pytest.mark.parametrize("target", [aot("h100:8")])
def test_targets_say_their_memory(target: str, monkeypatch) -> None:
    monkeypatch.setitem(SIZES, "a", (512, 256))
    monkeypatch.setitem(SIZES, "b", (512, 512))
    x = jnp.ones((8, 512))
    report = sharded("auto").on(target, create(), x)
    choice = report.plan.offload
    assert choice.bound == report.target.memory and not choice.leaves
    assert [t.compiled for t in choice.trials] == [report.memory.peak]
    assert choice.estimate < 0.8 * choice.compiled, "the estimate is good by now"
    # What the compiler says corrects it.
    bound = f"{(report.memory.peak - 64 * KIB) / KIB} KiB"
    choice = sharded(bound).on(target, create(), x).plan.offload
    assert choice.fits and choice.compiled <= choice.bound
    assert 0 < choice.host_bytes and len(choice.trials) <= OFFLOAD_COMPILATIONS


def compile_at(beyond: Callable[[OffloadChoice], int | None], bound: int) -> Any:
    """The choice for a compiler by which a step takes so many bytes more than by the
    plan, or that refuses it."""
    step = sharded(f"{bound / KIB} KiB")

    def compiled_as(programs: Any) -> Built:
        choice = next(iter(programs.storage.chosen.values()))
        more = beyond(choice)
        if more is None:
            raise shardfn.ShardingError("the step does not fit")
        memory = Memory(choice.estimate + more, 0, 0, 0, 0)
        return Built(programs, None, None, memory)  # type: ignore

    states, batch = step._divide((create(), X), {})
    programs = replace(step.programs, storage=step.storage.on(MESH))
    built = fitting(programs, states, batch, 0, compiled_as)
    return next(iter(built.programs.storage.chosen.values()))


@pytest.mark.parametrize(
    "beyond, fewer, chosen, compiled",
    [
        (lambda choice: 0, 0, set(), 1),
        # The estimate is too low, by as much or by half as much with all on the host.
        (lambda choice: 2 * KIB, 0, {"m/b"}, 2),
        (lambda choice: KIB if choice.leaves else 2 * KIB, 0, {"m/a"}, 3),
        # The estimate is too high: less has to go, or nothing.
        (lambda choice: -2 * KIB, 3 * KIB, {"m/a"}, 2),
        (lambda choice: -3 * KIB, 3 * KIB, set(), 2),
        # Refused, and then by how much is known.
        (lambda choice: KIB if choice.leaves else None, 0, {"m/a"}, 3),
    ],
)
def test_compilers_correct_the_choice(
    beyond: Any, fewer: int, chosen: set[str], compiled: int, monkeypatch
) -> None:
    monkeypatch.setattr("shardfn._schedule.host_transfers.HOST_BLOCK_BYTES", 1)
    found = compile_at(beyond, WHOLE.without - fewer)
    assert set(found.leaves) == chosen and found.fits, found
    assert len(found.trials) == compiled
    assert found.compiled == found.estimate + beyond(found)


def test_what_never_fits_is_said() -> None:
    found = compile_at(lambda choice: 2**30, WHOLE.without)
    assert not found.fits and found.leaves
    text = offload_table(found)
    assert "which is more than" in text and "(limits.OFFLOAD_COMPILATIONS)" in text
    with pytest.raises(shardfn.ShardingError, match="the step does not fit"):
        compile_at(lambda choice: None, WHOLE.without)
