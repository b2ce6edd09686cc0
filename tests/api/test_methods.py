"""In: steps in classes. Out: they are methods where the plain function is one."""

import copy
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs.spoiled import init, make_batch, plain_step

import shardfn

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate, self.table, self.traced = rate, jnp.arange(24.0), 0

    def update(self, state, batch):
        self.traced += 1
        new, metrics = plain_step(state, batch)
        w = state["w"] + self.rate * (new["w"] - state["w"]) + self.table
        return new | {"w": w}, metrics

    step = shardfn.fully_shard(update, MESH, min_size=8, donate=False)

    @shardfn.fully_shard(mesh=MESH, min_size=8)
    @functools.partial(jax.jit, static_argnums=0)
    def jitted(self, state, batch):
        return self.update(state, batch)

    partial = shardfn.fully_shard(functools.partial(plain_step), MESH)
    static = staticmethod(shardfn.fully_shard(plain_step, MESH))


def test_a_method_is_bound_to_its_object() -> None:
    first, second = Trainer(1.0), Trainer(3.0)
    for trainer in (first, second, copy.copy(first)):
        state = plain = trainer.step.init(init, jax.random.key(0))
        for _ in range(2):
            state, metrics = trainer.step(state, batch=make_batch())
            plain, expected = trainer.update(plain, make_batch())
        np.testing.assert_allclose(state["w"], plain["w"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert first.step.plan(state, make_batch()) == Trainer.step.__get__(first).plan(
        state, make_batch()
    )


def test_it_is_traced_once_per_object() -> None:
    trainer = Trainer(1.0)
    state = trainer.step.init(init, jax.random.key(0))
    for _ in range(3):
        trainer.step(state, make_batch())
    before = trainer.traced
    trainer.step(state, make_batch())
    assert trainer.traced == before
    assert trainer.step.__wrapped__(state, make_batch())[0].keys() == state.keys()
    assert repr(trainer.step).startswith("ShardedStep(update over data=8")


def test_a_jitted_method_and_an_object_that_nobody_keeps() -> None:
    state = Trainer(2.0).jitted.init(init, jax.random.key(0))
    new, _ = Trainer(2.0).jitted(state, make_batch())
    assert new["count"] == 1


def test_the_steps_of_an_object_end_with_it() -> None:
    trainer = Trainer(1.0)
    trainer.step.plan(jax.eval_shape(init, jax.random.key(0)), make_batch())
    kept, gone = len(Trainer.step._bound), weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None and len(Trainer.step._bound) < kept


def test_what_is_no_method_stays_as_it_is() -> None:
    trainer = Trainer(1.0)
    assert trainer.partial is Trainer.partial
    assert trainer.static is Trainer.static
    assert Trainer.step is vars(Trainer)["step"]


def test_a_method_without_a_mesh() -> None:
    class Local:
        rate = 2.0

        @shardfn.fully_shard()
        def step(self, w, x):
            return w * self.rate, x.sum()

    local = Local()
    w = jnp.ones((64, 512))

    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=(local.step.specs(w, MESH), jax.P()),
    )
    def run(w, x):
        return local.step(local.step.shard(w), x)

    new, total = jax.jit(run)(w, jnp.ones(16))
    assert (new == 2.0).all() and total == 16.0


def test_an_object_that_cannot_be_referred_to_weakly() -> None:
    class Slotted:
        __slots__ = ()

        step = shardfn.fully_shard(plain_step, MESH)

    with pytest.raises(shardfn.ShardingError) as error:
        _ = Slotted().step
    message = str(error.value)
    assert message.startswith("train_step is a method of a Slotted, which cannot be")
    assert "test_methods.py:" in message
    assert message.endswith("shard a function that takes what the method reads.")


def test_an_axis_that_only_the_object_names() -> None:
    """The step spells out a device's shapes, so it fails on the global batch."""

    class PerDevice:
        @shardfn.fully_shard(mesh=MESH)
        def step(self, w, x):
            mean = jax.lax.pmean(x.reshape(2).sum(), self.axes["batch"])
            return w + mean, mean

    trainer = PerDevice()
    trainer.axes = {"batch": "data"}
    w, mean = trainer.step(jnp.zeros((64, 512)), jnp.ones(16))
    assert mean == 2.0 and (w == 2.0).all()
