"""In: steps in a `shard_map` whose arguments could be several things on a device. Out:
what they are comes from the states that the step was given, a trace, and types; or an
error that shows what it could be.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import shardfn

pytestmark = pytest.mark.standard_promotion

WHOLE = P()
TX = optax.sgd(0.125, momentum=0.5)
X = np.arange(32, dtype=np.float32).reshape(16, 2) / 16
WIDE = {"w": jnp.arange(32.0).reshape(2, 16) / 16}
"""Its shards are of shape (2, 2), as are those of `LONG`."""
LONG = {"w": jnp.arange(32.0).reshape(16, 2) / 16}
SQUARE, ROWS = {"w": jnp.ones((16, 16))}, np.ones((16, 16), np.float32)
VECTOR = {"w": jnp.arange(16.0)}
SMALL = {"w": jnp.ones((2, 2))}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def mapped(fn: Callable, in_specs: Any, out_specs: Any = WHOLE) -> Callable:
    return jax.jit(
        jax.shard_map(fn, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)
    )


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converted:
    """Takes arrays alone."""

    w: Any

    def __post_init__(self) -> None:
        self.w = jnp.asarray(self.w)


# Steps, with the positions of their state


def params_and_moments(params, opt, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt = TX.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt, loss


def batch_first(x, params):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return loss, jax.tree.map(lambda w, g: w - g / 8, params, grads)


def teacher(params, x, fixed):
    def distance(params):
        return jnp.mean((x @ params["w"] - x @ fixed["w"]) ** 2)

    grads = jax.grad(distance)(params)
    return jax.tree.map(lambda w, g: w - g / 8, params, grads), distance(params)


def of_class(x, model):
    loss, params = batch_first(x, {"w": model.w})
    return loss, Converted(params["w"])


def by_name(params, *, opt, x):
    params, opt, loss = params_and_moments(params, opt, x)
    return {"loss": loss, "opt": opt, "params": params}


FOUND = {
    "two states": (params_and_moments, (WIDE, TX.init(WIDE), X), {}, (0, 1)),
    "a state behind the batch": (batch_first, (X, WIDE), {}, (1,)),
    "a class that takes arrays alone": (of_class, (X, Converted(WIDE["w"])), {}, (1,)),
    "a teacher": (teacher, (WIDE, X, jax.tree.map(jnp.cos, WIDE)), {}, (0, 2)),
    "a state by name": (by_name, (WIDE,), {"opt": TX.init(WIDE), "x": X}, (0, "opt")),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_state_is_found_wherever_it_stands(kind: str) -> None:
    step, args, named, places = FOUND[kind]
    local = shardfn.fully_shard(step, min_size=8)
    given = {str(p): x for p, x in (*enumerate(args), *named.items())}
    places = [str(p) for p in places]

    def run(given):
        sharded = {p: local.shard(x) if p in places else x for p, x in given.items()}
        positional = [sharded[str(i)] for i in range(len(args))]
        out = local(*positional, **{k: sharded[k] for k in named})

        def whole(tree):
            like = any(
                jax.tree.structure(tree) == jax.tree.structure(given[p]) for p in places
            )
            return local.unshard(tree) if like else tree

        if isinstance(out, dict):
            return {key: whole(x) for key, x in out.items()}
        return tuple(map(whole, out))

    specs = {p: P() if p in places else P("data") for p in given}
    assert_same(mapped(run, (specs,))(given), step(*args, **named))


@pytest.mark.parametrize("asked", [(0, 1), (1, 0)], ids=str)
def test_states_said_by_hand_that_are_read_only(asked) -> None:
    """They do not come back; given by hand, they are in the order of `state_argnums`,
    and shards have one shape."""

    def frozen_first(frozen, w, x):
        return {"w": w["w"] + frozen["w"].sum()}, (x.sum(0) @ w["w"]).min()

    step = shardfn.fully_shard(frozen_first, min_size=8, state_argnums=asked)
    local = step.with_state(*((LONG, WIDE)[i] for i in asked))

    def run(frozen, w, x):
        new, low = local(local.shard(frozen), local.shard(w), x)
        return step.with_state(WIDE).unshard(new), low

    out = mapped(run, (P(), P(), P("data")))(LONG, WIDE, X)
    assert_same(out, frozen_first(LONG, WIDE, X))


def test_several_states_said_by_hand() -> None:
    """Of one structure, and with shards of one shape: their order tells them apart."""

    def two(wide, long, x):
        inner = x.sum(0) @ wide["w"]
        new = {"w": wide["w"] + 1}, {"w": long["w"] * inner[:, None]}
        return *new, long["w"].min()

    step = shardfn.fully_shard(two, min_size=8, state_argnums=(0, 1))
    local = step.with_state(WIDE, LONG)

    def run(wide, long, x):
        wide, long = local.shard(wide), local.shard(long)
        wide, long, low = local(wide, long, x)
        return (
            step.with_state(WIDE).unshard(wide),
            step.with_state(LONG).unshard(long),
            low,
        )

    got = mapped(run, (P(), P(), P("data")))(WIDE, LONG, X)
    assert_same(got, two(WIDE, LONG, X))


def test_parts_of_a_state_that_was_made_together() -> None:
    local = shardfn.fully_shard(params_and_moments, min_size=8)

    def run(x):
        params, opt = local.init(lambda: (WIDE, TX.init(WIDE)))
        out = local(params, opt, x)
        return local.unshard(out[:2])

    expected = params_and_moments(WIDE, TX.init(WIDE), X)[:2]
    assert_same(mapped(run, P("data"))(X), expected)


def test_types_say_what_of_the_batch_is_the_same_everywhere() -> None:
    """One that does not vary over the axis is no part of something larger."""

    def scaled(state, x, scale):
        return {"w": state["w"] - scale.sum() * x.sum()}, scale * x.sum()

    local, scale = shardfn.fully_shard(scaled, min_size=8), jnp.arange(3.0)

    def run(state, x, scale):
        new, seen = local(local.shard(state), x, scale)
        return local.unshard(new), seen

    got = mapped(run, (P(), P("data"), P()))(WIDE, X, scale)
    assert_same(got, scaled(WIDE, X, scale))


# Errors


def plain(state, x):
    return {"w": state["w"] + 1}, {"sum": state["w"].sum() + 0 * x.sum()}


def given(*states: Any, step: Callable = plain) -> shardfn.LocalStep:
    """A step that was given these whole states."""
    local = shardfn.fully_shard(step, min_size=8)
    for state in states:
        local.specs(state, mesh())
    return local


def traced(fn: Callable, *args: Any, specs: Any) -> str:
    with pytest.raises(shardfn.ShardingError) as error:
        jax.eval_shape(mapped(fn, specs, P("data")), *args)
    message = str(error.value)
    assert "test_local_arguments.py:" in message
    return message


def test_a_whole_state_that_has_the_shape_of_a_shard() -> None:
    local = given(LONG)
    for method, more in ((local, (X,)), (local.unshard, ())):
        specs = (P(), P("data"))[: 1 + len(more)]
        message = traced(method, SMALL, *more, specs=specs)
        assert "state leaf 'w' is the same on all devices of mesh axis" in message
        assert "it is whole, or no shard of the state" in message
        assert "jax.lax.pcast(x, 'data', to='varying')" in message


@pytest.mark.parametrize("kind", ["shard_map", "pmap"])
def test_without_types_nothing_tells_a_whole_leaf_from_a_shard(kind) -> None:
    """JAX gives both the same avals, so the step goes by the states that it was given:
    a whole vector of 2 is taken for shards of the 16 of `step.specs`."""
    seen, local = [], given(VECTOR, step=lambda s, x: (s, jnp.sum(s["w"])))

    def run(w, x):
        seen.append((jax.typeof(w), jax.typeof(w).sharding))
        return local({"w": w}, x)[1][None]

    def ran(spec, w):
        if kind == "pmap":
            in_axes = None if spec == P() else 0
            w = w if spec == P() else w.reshape(8, 2)
            return jax.pmap(run, "data", in_axes=(in_axes, 0))(w, X.reshape(8, 2, 2))
        specs = {"in_specs": (spec, P("data")), "out_specs": P("data")}
        return jax.jit(jax.shard_map(run, mesh=mesh(), check_vma=False, **specs))(w, X)

    assert ran(P("data"), jnp.arange(16.0)).ravel()[0] == 120
    assert ran(P(), jnp.arange(2.0)).ravel()[0] == 8  # of the plain step 1
    assert len(seen) == 2 and seen[0] == seen[1]


def test_shards_that_are_all_the_same_on_purpose() -> None:
    local = given(LONG)

    def run(x):
        ones = {"w": lax.pcast(jnp.ones((2, 2)), "data", to="varying")}
        return local(ones, x)[1]["sum"]

    assert mapped(run, P("data"))(X) == 32


def test_what_differs_between_devices_is_not_taken_for_the_same() -> None:
    def noisy(state, x, key):
        return {"w": state["w"] + jax.random.normal(key, state["w"].shape)}, x.sum()

    local = given(LONG, step=noisy)

    def run(state, x):
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
        return local(local.shard(state), x, key)

    message = traced(run, LONG, X, specs=(P(), P("data")))
    assert "batch leaf 'key' differs between devices of mesh axis 'data'" in message
    assert "let the step make of it what differs" in message
    tiny = given({"w": jnp.ones((2, 2))})
    message = traced(tiny, LONG, X, specs=(P("data"), P("data")))
    assert "state leaf 'w' differs between devices of mesh axis 'data'" in message


def test_shards_that_could_be_of_two_states() -> None:
    local = given(LONG, WIDE)
    message = traced(local, LONG, X, specs=(P("data"), P("data")))
    assert "could be one with leaves of shapes [(16, 2)] or [(2, 16)]" in message
    assert "Say which: step.with_state(whole_state)" in message
    run = mapped(lambda s, x: local.with_state(WIDE)(s, x)[1]["sum"], (P("data"),) * 2)
    assert run(LONG, X) == LONG["w"].sum()


def test_shards_of_a_state_that_was_not_given() -> None:
    message = traced(
        given(LONG), {"w": jnp.ones((24, 4))}, X, specs=(P("data"), P("data"))
    )
    assert "the state is not one that this step was given" in message
    assert "its leaves have shapes [(3, 4)] here; this step was given" in message
    assert "[(16, 2)], whose shards have others" in message
    # The trace on rows finds that it is state, too.
    step = given(SQUARE, step=params_and_moments)
    opt = jax.tree.map(lambda x: x * 2, TX.init(SQUARE))
    message = traced(step, SQUARE, opt, ROWS, specs=(P("data"),) * 3)
    assert "argument 1 ('opt') is not one that this step was given" in message


def test_another_state_than_by_hand() -> None:
    local = given().with_state(LONG)
    message = traced(local.shard, WIDE, specs=P())
    assert "the state is not the one that with_state was given" in message


def test_arguments_of_which_two_readings_fit() -> None:
    """The second is a state of (2, 16), or rows of a batch of (16, 2)."""

    def both(state, other, x):
        new = jax.tree.map(lambda w: w + x.sum(), state)
        return new, {"w": 2 * other["w"]}, x.sum()

    local = given(WIDE, step=both)
    shards = {"w": P(None, "data")}
    message = traced(local, WIDE, WIDE, X, specs=(shards, shards, P("data")))
    assert "it cannot be told which arguments of both are its state" in message
    assert (
        "argument 1 ('other') may be the shards of a state of shapes [(2, 16)], or "
        "rows of [(16, 2)]" in message
    )
    assert "state_argnums=(0, 1) to fully_shard if it is state, state" in message

    def named(local):
        return lambda state, other, x: local(state, other=other, x=x)

    local = given(WIDE, step=lambda state, *, other, x: both(state, other, x))
    message = traced(named(local), WIDE, WIDE, X, specs=(shards, shards, P("data")))
    assert (
        "Pass state_argnums=(0, position of 'other') to fully_shard if it is state, "
        "state_argnums=0 if it is of the batch. No position yet: 'other'," in message
    )
