"""Planning without collections of garbage."""

import gc
import traceback
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core.garbage import uncollected
from shardfn._lowering.plan_jaxpr import plan_jaxpr


@pytest.fixture
def collected_in() -> Iterator[set[str]]:
    """Functions that ran when Python collected garbage, which it does often here."""
    names, before = set[str](), gc.get_threshold()

    def note(phase: str, _: object) -> None:
        if phase == "start":
            names.update(frame.name for frame in traceback.extract_stack())

    gc.set_threshold(50, *before[1:])
    gc.callbacks.append(note)
    try:
        yield names
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def train_step(state, x):
    grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w["in"]) @ w["out"]))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)


def test_nothing_is_collected_while_a_step_is_planned(collected_in):
    """Planned without an end to collections, plan_jaxpr is among them."""
    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    step = shardfn.fully_shard(train_step, cpu_mesh(8))
    step.plan({"in": w, "out": w}, jax.ShapeDtypeStruct((16, 32), jnp.float32))
    assert train_step.__name__ in collected_in  # traced as the user has it
    assert plan_jaxpr.__name__ not in collected_in
    assert gc.isenabled()


def test_collections_are_as_before_behind_an_error():
    with pytest.raises(ValueError, match="in it"), uncollected():
        assert not gc.isenabled()
        raise ValueError("in it")
    assert gc.isenabled()


def test_who_has_no_collections_has_none_behind_it():
    gc.disable()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
