"""In: steps, states, batches and meshes that cannot be sharded. Out: an error that says
what, where, why and what to do; afterwards the caller's state still trains.
"""

import functools
import re
from collections.abc import Callable, Iterator
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P
from programs.spoiled import (
    EFFECTS,
    changed,
    init,
    looped_effect,
    make_batch,
    plain_step,
    returning,
    train_step,
    with_control_flow,
    with_effect,
)

import shardfn
import shardfn.testing

FLAGS = ("jax_scan3", "jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
OPTIONS = {"axis": "data", "min_size": 8}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",))


@pytest.fixture(scope="module")
def good(mesh) -> shardfn.ShardedStep:
    return shardfn.fully_shard(plain_step, mesh, **OPTIONS)


@pytest.fixture
def state(good) -> Iterator[dict[str, jax.Array]]:
    """A sharded state; after the test it has to be usable, and unchanged."""
    whole = init(jax.random.key(0))
    state = good.shard(whole)
    yield state
    expected, metrics = jax.jit(plain_step)(whole, make_batch())
    new, measured = good(state, make_batch())
    np.testing.assert_allclose(measured["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(good.unshard(new)["w"], expected["w"], rtol=1e-4)


def refuse(call: Callable[[], object], *parts: str, what: str = "train_step") -> str:
    """Asserts that `call` raises a `ShardingError` with `parts` and its own line."""
    with pytest.raises(shardfn.ShardingError) as caught:
        call()
    message = str(caught.value)
    line = call.__code__.co_firstlineno
    parts = (*parts, f"{what} was called at test_bad_input.py:{line} ")
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in the message:\n{message}"
    assert isinstance(caught.value, ValueError)
    first, *rest, last = message.splitlines()
    assert rest and first.endswith(".") and last.endswith("."), message
    assert not re.search(r"object at 0x|Traceback|ShapedArray|PyTreeDef", message)
    return message


# The mesh


def test_no_such_mesh_axis(mesh, state) -> None:
    refuse(
        lambda: shardfn.fully_shard(train_step, mesh, axis="fsdp"),
        "the mesh has no axis 'fsdp'; its axes are ('data',)",
        "Pass axis='data'",
        "jax.make_mesh((8,), ('fsdp',))",
        what="fully_shard",
    )


def test_one_axis_of_several_is_missing(mesh, state) -> None:
    refuse(
        lambda: shardfn.fully_shard(train_step, mesh, axis=("replica", "data")),
        "the mesh has no axis 'replica'; its axes are ('data',)",
        "jax.make_mesh((1, 8), ('replica', 'data')) and sizes of your own",
        what="fully_shard",
    )


@pytest.mark.parametrize("where", ["mesh", "the caller's shard_map"])
def test_an_axis_given_twice(where: str, mesh, state) -> None:
    mesh = mesh if where == "mesh" else None
    refuse(
        lambda: shardfn.fully_shard(train_step, mesh, axis=("data", "data")),
        "axis=('data', 'data') names mesh axis 'data' twice",
        what="fully_shard",
    )


@pytest.mark.parametrize(
    "option, value, advice",
    [
        ("mesh", (8,), "Pass a mesh, such as jax.make_mesh((jax.device_count(),), "),
        ("mesh", [0], "or None for a step inside jax.shard_map."),
        ("axis", (), "Pass a mesh axis, such as 'data', or a tuple of them."),
        ("axis", 0, "Pass a mesh axis"),
        ("min_size", "1k", "Pass a number of elements, such as 2**14, or 0 to shard"),
        ("min_size", -1, "Pass a number of elements"),
        ("min_size", 1e4, "Pass a number of elements"),
        ("state_argnums", -1, "Pass the state's position counted from 0, a tuple"),
        ("state_argnums", (), "Pass the state's position"),
        ("state_argnums", (0, 0), "Pass each position once."),
        ("strict", "yes", "Pass True or False."),
        ("donate", None, "Pass True or False."),
        ("verify", True, "Pass 'error' or 'warn'"),
        ("train_step", 3, "Pass a function (state, batch) -> (state, ...)."),
        ("train_step", Ellipsis, "Pass a function"),
    ],
)
def test_values_that_an_option_does_not_have(mesh, option, value, advice) -> None:
    arguments = {"train_step": train_step, "mesh": mesh, option: value}
    says = (
        f"verify={value} is none of"
        if option == "verify"
        else (f"{option} cannot be {value!r}.\n")
    )
    refuse(lambda: shardfn.fully_shard(**arguments), says, advice, what="fully_shard")


@pytest.mark.parametrize(
    "option, advice",
    [
        (
            "reshard_after_foward",
            "Did you mean reshard_after_forward=...? Its options ",
        ),
        ("state_argnum", "Did you mean state_argnums=...?"),
        ("mixed_precision", "Its options are mesh, axis, min_size, strict, "),
    ],
)
def test_options_that_there_are_not(mesh, option, advice) -> None:
    for args in ((plain_step, mesh), ()):
        refuse(
            lambda args=args: shardfn.fully_shard(*args, **{option: 1}),
            f"fully_shard has no option '{option}'.",
            advice,
            what="fully_shard",
        )


def test_a_mesh_in_place_of_the_step(mesh) -> None:
    refuse(
        lambda: shardfn.fully_shard(mesh),
        "train_step cannot be ",
        "Pass the step first, or fully_shard(mesh=mesh).",
        what="fully_shard",
    )


# A model


@pytest.mark.parametrize(
    "model",
    [
        linen.Dense(3),
        linen.Module(),
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0)),
        eqx.Module(),
    ],
    ids=lambda model: type(model).__module__ + "." + type(model).__name__,
)
def test_a_model_in_place_of_the_step(mesh, model) -> None:
    refuse(
        lambda: shardfn.fully_shard(model, mesh),
        "fully_shard takes the whole training step, not a model: "
        f"{type(model).__name__} is one.",
        "see From PyTorch FSDP2.",
        what="fully_shard",
    )


class EquinoxStep(eqx.Module):
    def __call__(self, state, batch):
        return plain_step(state, batch)


class NnxStep(nnx.Module):
    def __call__(self, state, batch):
        return plain_step(state, batch)


class PlainStep:
    def __call__(self, *args):
        return plain_step(*args)


STEPS = (EquinoxStep(), NnxStep(), PlainStep(), eqx.filter_jit(plain_step))
STEPS += (functools.partial(plain_step), jax.jit(plain_step))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_objects_that_are_steps(mesh, step) -> None:
    abstract = jax.eval_shape(init, jax.random.key(0))
    plan = shardfn.fully_shard(step, mesh, **OPTIONS).plan(abstract, make_batch())
    assert plan.collectives


# A step that is sharded already


@pytest.mark.parametrize("wrap", [lambda step: step, functools.partial])
def test_a_step_that_is_sharded_already(good, mesh, wrap) -> None:
    step = wrap(good)
    refuse(
        lambda: shardfn.fully_shard(step, mesh),
        "train_step is sharded already: it is a ShardedStep, which fully_shard made.",
        "Pass the plain function: the sharded one has it as __wrapped__.",
        what="fully_shard",
    )
    local = shardfn.fully_shard(plain_step)
    refuse(
        lambda: shardfn.testing.assert_parity(local, mesh, {}),
        "train_step is sharded already: it is a LocalStep",
        what="assert_parity",
    )


def test_a_step_that_calls_a_sharded_one(good, mesh, state) -> None:
    @jax.jit
    def train_step(state, batch):
        return good(state, batch)

    step = shardfn.fully_shard(train_step, mesh, **OPTIONS)
    line = test_a_step_that_calls_a_sharded_one.__code__.co_firstlineno + 3
    refuse(
        lambda: step.plan(state, make_batch()),
        "train_step uses jax.shard_map, whose parts fully_shard cannot divide again.",
        f"at test_bad_input.py:{line} ",
        "call the plain step there",
        "(shardfn.register_rule)",
        what="train_step.plan",
    )


# The batch


def test_a_batch_that_the_devices_do_not_divide(good, state) -> None:
    step = shardfn.fully_shard(train_step, good.mesh, **OPTIONS)
    rows = {"x": make_batch()["x"], "y": np.zeros((30, 24), np.float32)}
    refuse(
        lambda: step(state, rows),
        "batch leaf 'y' has 30 rows, which 8 devices on mesh axis 'data' cannot split "
        "evenly.",
        "Pad the batch to 32 rows and mask the loss",
        "batch_spec={'y': jax.P()} to replicate it",
    )


def test_a_mistake_in_the_step_is_named_before_uneven_rows(mesh) -> None:
    """Where it cannot be traced, what comes back is not known: moments of 50 rows are
    taken for a batch."""

    def train_step(params, moments, x):
        loss = lambda w: jnp.mean((x @ w @ jnp.ones((7, 2))) ** 2)  # noqa: E731
        grads = jax.grad(loss)(params)
        return params - grads, moments + grads

    w = jnp.ones((50, 3))
    words = (
        "cannot split evenly.\n  the step fails where it is traced to find its state: "
        r"TypeError: dot_general requires contracting .*\(3,\) and \(7,\)"
    )
    with pytest.raises(shardfn.ShardingError, match=words):
        shardfn.fully_shard(train_step, mesh).plan(w, w, jnp.ones((16, 50)))


def test_rows_behind_microbatches_are_named(mesh, state) -> None:
    def step(state, batch):
        return state, batch["x"].sum()

    sharded = shardfn.fully_shard(step, mesh, **OPTIONS)
    refuse(
        lambda: sharded.plan(state, {"x": jnp.ones((3, 16, 4))}),
        "batch leaf 'x' has 3 rows, which 8 devices",
        "If its rows are in dimension 1, behind microbatches, pass "
        "batch_spec={'x': jax.P(None, 'data')}. Else:",
        "Pad the batch to 8 rows",
        what="step.plan",
    )


def test_the_plan_refuses_that_batch_too(good, state) -> None:
    uneven, batch = "batch leaf 'x' has 30 rows", make_batch(30)
    refuse(lambda: good.plan(state, batch), uneven, what="train_step.plan")
    refuse(lambda: good.lower(state, batch), uneven, what="train_step.lower")


def test_a_nested_batch_leaf_is_named_by_its_path(good, state) -> None:
    batch = {"inputs": [make_batch()["x"], make_batch(4)["x"]]}
    refuse(
        lambda: good(state, batch),
        "batch leaf 'inputs/1' has 4 rows, which 8 devices",
        "Pad the batch to 8 rows",
        "batch_spec={'inputs': (None, jax.P())} to replicate it",
    )


def test_a_state_or_batch_of_one_array_has_a_name(mesh) -> None:
    def step(w, x):
        return (w + 1 if x.ndim > 1 else w.astype(jnp.bfloat16)), x.sum()

    step = shardfn.fully_shard(step, mesh, min_size=0)
    w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
    for args, says in [
        ((w, x[:3]), "batch leaf 'batch' has 3 rows, which 8 devices"),
        ((w, {8}), "batch leaf 'batch' is a set, not an array"),
        ((w, x[0, :8]), "changes state leaf 'state' from float32[16, 16] to bfloat16["),
    ]:
        refuse(lambda args=args: step(*args), says, what="step")


def test_a_batch_without_rows_is_what_it_is_to_the_plain_step(good, state) -> None:
    whole, empty = init(jax.random.key(1)), make_batch(0)
    new, metrics = good(good.shard(whole), empty)
    expected, measured = jax.jit(plain_step)(whole, empty)
    assert np.isnan(measured["loss"])
    jax.tree.map(np.testing.assert_array_equal, metrics, measured)
    jax.tree.map(np.testing.assert_array_equal, good.unshard(new), expected)


def test_a_batch_that_a_hybrid_mesh_does_not_divide() -> None:
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    step = shardfn.fully_shard(train_step, mesh, axis=("replica", "data"), min_size=8)
    state = step.shard(init(jax.random.key(0)))
    refuse(
        lambda: step(state, make_batch(12)),
        "batch leaf 'x' has 12 rows, which 8 devices on mesh axes 'replica' x 'data' "
        "cannot split evenly.",
        "Pad the batch to 16 rows",
    )
    step(state, make_batch())


def test_a_batch_spec_for_a_leaf_that_is_not_there(mesh, state) -> None:
    step = shardfn.fully_shard(train_step, mesh, batch_spec={"z": P()}, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        "batch_spec names ['z'], but the batch has ['x', 'y'].",
    )


def test_a_batch_spec_of_another_mesh(mesh, state) -> None:
    spec = {"x": P("model")}
    step = shardfn.fully_shard(train_step, mesh, batch_spec=spec, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        "batch_spec of leaf 'x' is PartitionSpec('model',), but the mesh has no axis "
        "'model'",
    )


# The state


@pytest.mark.parametrize(
    "changes, parts",
    [
        (
            {"w": lambda w: w.astype(jnp.bfloat16)},
            ["state leaf 'w' from float32[7, 24] to bfloat16[7, 24]", "cast"],
        ),
        (
            {"w": lambda w: w[:5]},
            ["state leaf 'w' from float32[7, 24] to float32[5, 24]"],
        ),
        (
            {"count": lambda c: c[None]},
            ["state leaf 'count' from int32[] to int32[1]"],
        ),
        ({"extra": lambda _: jnp.ones(3)}, ["new leaves 'extra'"]),
        ({"count": lambda _: None}, ["missing leaves 'count'"]),
    ],
)
def test_a_step_that_changes_its_state(mesh, state, changes, parts) -> None:
    step = shardfn.fully_shard(changed(**changes), mesh, **OPTIONS)
    refuse(lambda: step(state, make_batch()), "train_step changes", *parts)
    parts, what = ("train_step changes", *parts), "train_step.plan"
    refuse(lambda: step.plan(state, make_batch()), *parts, what=what)


@pytest.mark.parametrize("count", [0, jnp.asarray(0), jnp.int32(0)])
def test_a_weakly_typed_leaf_that_changes(mesh, state, count) -> None:
    step = shardfn.fully_shard(
        changed(count=lambda x: x.astype(jnp.float32)), mesh, **OPTIONS, donate=False
    )
    message = refuse(
        lambda: step.plan(state | {"count": count}, make_batch()),
        "changes state leaf 'count' from int32[] to float32[]",
        "start with the type that the step returns.",
        what="train_step.plan",
    )
    why = (
        "The leaf is weakly typed, as Python numbers are: jax.jit would compile again "
        "with float32 in its second call, and lax.scan would cast it before its first "
        "iteration. Start with jnp.float32(...). "
    )
    assert (why in message) == (not isinstance(count, jax.Array) or count.weak_type)


def test_a_step_that_turns_its_state_into_a_tuple(mesh, state) -> None:
    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        return (new["count"], new["w"]), metrics

    step = shardfn.fully_shard(train_step, mesh, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        "train_step returns no state",
        "with the leaves 'count', 'w' must come first.",
        "(new_state, metrics)",
    )


@pytest.mark.parametrize(
    "metric, what",
    [("warm up", "str: 'warm up'"), (len, "builtin_function_or_method: <built-in")],
)
def test_a_step_that_returns_what_is_no_array(mesh, state, metric, what) -> None:
    def train_step(state, batch):
        new, loss = plain_step(state, batch)
        return new, {"loss": loss, "stage": metric, "count": 3}

    step = shardfn.fully_shard(train_step, mesh, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        f"train_step returns 1/stage of type {what}",
        "Return what is none from around the step",
    )


def test_a_step_that_returns_its_state_second(mesh, state) -> None:
    def swapped(*args):
        return plain_step(*args)[::-1]

    step = shardfn.fully_shard(swapped, mesh, **OPTIONS, state_argnums=0)
    refuse(
        lambda: step(state, make_batch()),
        "returns no state: it returned a tuple of 2",
        "Result 1 has the state's form: return it first, or leave state_argnums out.",
        what="swapped",
    )


def test_a_large_state_is_not_listed_whole(mesh) -> None:
    step = shardfn.fully_shard(lambda state: (), mesh)
    refuse(
        lambda: step([jnp.ones(8)] * 40),
        "with the leaves '0', '1', '2', '3', '4', '5', '6', '7' and 32 more must come",
        "Modules of flax.nnx that it changes in place have to be arguments of their",
        what="<lambda>",
    )


@pytest.mark.parametrize(
    "choose, what",
    [
        (lambda state, _: None, "None"),
        (lambda state, _: (), "a tuple of 0"),
    ],
)
def test_a_step_that_returns_nothing(mesh, state, choose, what) -> None:
    step = shardfn.fully_shard(returning(choose), mesh, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        f"train_step returns no state: it returned {what}",
        "(new_state, metrics)",
    )


def test_a_donated_state_used_again(good, state) -> None:
    old = good.shard(init(jax.random.key(1)))
    good(old, make_batch())
    refuse(
        lambda: good(old, make_batch()),
        "state leaf 'count' was donated to an earlier call",
        "Use the state that train_step returned",
        "donate=False",
    )


def test_abstract_leaves(good, state) -> None:
    abstract = jax.eval_shape(init, jax.random.key(0))
    refuse(
        lambda: good(abstract, make_batch()),
        "state leaf 'count' is a ShapeDtypeStruct, which has no values",
        "init(init_fn, ...)",
        "only plan, lower and shardings take abstract values",
    )
    batch = jax.eval_shape(lambda: make_batch())
    refuse(
        lambda: good(state, batch),
        "batch leaf 'x' is a ShapeDtypeStruct, which has no values",
    )
    assert good.plan(abstract, batch) == good.plan(state, make_batch())


@pytest.mark.parametrize(
    "leaf, what",
    [
        ({"adam"}, "a set"),
        (object(), "an object"),
        (np.array(["a", "b"] * 8), "an array of dtype <U1"),
        (np.array([None] * 16), "an array of dtype object"),
    ],
)
def test_leaves_that_are_no_arrays(good, state, leaf, what) -> None:
    with_leaf = state | {"name": leaf}
    parts = (f"leaf 'name' is {what}", "Pass arrays")
    refuse(lambda: good(with_leaf, make_batch()), "state", *parts)
    refuse(lambda: good(state, make_batch() | {"name": leaf}), "batch", *parts)


@pytest.mark.parametrize("method", ["init", "abstract"])
@pytest.mark.parametrize(
    "args, what",
    [
        (({"w": np.ones(8)},), "a dict"),
        ((np.ones(8), 1), "a ndarray"),
        ((eqx.nn.Linear(2, 3, key=jax.random.key(0)),), "a Linear"),
    ],
)
def test_a_state_where_the_function_that_makes_it_belongs(
    good, state, method, args, what
) -> None:
    refuse(
        lambda: getattr(good, method)(*args),
        f"{method} takes the function that makes the state, and was given what it "
        f"made: {what}.",
        f"step.{method}(create_state, key), not create_state(key)",
        "step.shard(state)",
        what=f"train_step.{method}",
    )


def test_functions_that_make_states(good, state) -> None:
    """Pytrees and classes among them."""
    makers = jax.tree_util.Partial(init), functools.partial(init), jax.jit(init)
    for make in (*makers, eqx.filter_jit(init)):
        assert good.abstract(make, jax.random.key(0))["w"].shape == (7, 24)
    assert good.init(dict) == {}


@pytest.mark.parametrize("method", ["init", "abstract"])
def test_making_leaves_that_are_no_arrays(good, state, method) -> None:
    def make(key):
        return {"model": eqx.nn.MLP(4, 4, 8, 1, key=key), "names": {"adam"}}

    refuse(
        lambda: getattr(good, method)(make, jax.random.key(0)),
        "state leaf 'names' is a set, not an array.",
        "by value, such as functions, text or a frozen dataclass, which is then static",
        what=f"train_step.{method}",
    )


# The step


def test_a_step_that_keeps_a_tracer(mesh, state) -> None:
    kept = []

    def train_step(state, batch):
        new, metrics = plain_step(state, batch)
        total = metrics["loss"] + (kept[-1] if kept else 0.0)
        kept.append(total)
        return new, {"loss": total}

    step = shardfn.fully_shard(train_step, mesh, donate=False, **OPTIONS)
    step(state, make_batch(16))
    refuse(
        lambda: step(state, make_batch(32)),
        "train_step is not pure",
        "tracer",
        "Return the value from the step, or pass it in as an argument.",
    )


@pytest.mark.parametrize("effect", list(EFFECTS))
def test_a_step_with_a_side_effect(mesh, state, effect) -> None:
    step = shardfn.fully_shard(with_effect(EFFECTS[effect]), mesh, **OPTIONS)
    line = EFFECTS[effect].__code__.co_firstlineno
    message = refuse(
        lambda: step(state, make_batch()),
        "train_step is not pure",
        "side effect",
        f"spoiled.py:{line}",
        "Return the value as a metric",
    )
    assert "/site-packages/" not in message


def checking(state, batch):
    checkify.check(batch["x"].sum() < 0, "positive")
    return plain_step(state, batch)


def test_a_check_whose_error_nothing_takes(mesh, state) -> None:
    step = shardfn.fully_shard(checking, mesh, donate=False, **OPTIONS)
    line = checking.__code__.co_firstlineno + 1
    refuse(
        lambda: checkify.checkify(step)(state, make_batch()),
        "checking has a checkify.check whose error nothing takes",
        f"  at test_bad_input.py:{line}",
        "error, out = checkify.checkify(function)(...)",
        what="checking",
    )

    def inside(state, batch):
        error, (state, metrics) = checkify.checkify(checking)(state, batch)
        return state, (metrics, error)

    step = shardfn.fully_shard(inside, mesh, **OPTIONS)
    _, (_, error) = step(step.shard(state), make_batch())
    assert error.get() is not None and "positive" in error.get()


def test_a_side_effect_inside_a_loop_is_found(mesh, state) -> None:
    step = shardfn.fully_shard(with_effect(looped_effect), mesh, **OPTIONS)
    line = looped_effect.__code__.co_firstlineno + 2
    refuse(
        lambda: step(state, make_batch()),
        "train_step is not pure",
        f"spoiled.py:{line}",
    )


def test_an_error_of_the_step_itself_passes_unchanged(mesh, state) -> None:
    def train_step(state, batch):
        raise KeyError("no such feature")

    step = shardfn.fully_shard(train_step, mesh, **OPTIONS)
    with pytest.raises(KeyError, match="no such feature"):
        step(state, make_batch())


def test_an_error_of_the_step_keeps_its_cause(mesh, state) -> None:
    def train_step(state, batch):
        try:
            {}["tokens"]
        except KeyError as error:
            raise ValueError("no tokens") from error

    step = shardfn.fully_shard(train_step, mesh, **OPTIONS)
    with pytest.raises(ValueError, match="no tokens") as caught:
        step(state, make_batch())
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "method, args, named",
    [
        ("__call__", (), {"train": True}),
        ("__call__", (True,), {}),
        ("plan", (), {"train": True}),
        ("lower", (), {"rows": 2, "train": True}),
    ],
)
def test_a_step_that_branches_on_an_argument(mesh, state, method, args, named) -> None:
    def train_step(state, batch, train, rows=None):
        if rows is not None:
            jnp.zeros(rows)
        return plain_step(state, batch) if train else (state, {})

    step = shardfn.fully_shard(train_step, mesh, donate=False, **OPTIONS)
    message = refuse(
        lambda: getattr(step, method)(state, make_batch(), *args, **named),
        "train_step asks for the value of an argument while it is traced",
        "  at test_bad_input.py:",
        "train=True), ...).",
        what="train_step" + f".{method}" * (method != "__call__"),
    )
    assert "functools.partial(train_step, " in message
    bound = functools.partial(train_step, train=True)
    shardfn.fully_shard(bound, mesh, **OPTIONS).plan(state, make_batch())


def _sliced(state, batch, k):
    return plain_step(state, batch)[0], batch["x"][:, :k].sum()


def _looped(state, batch, k):
    def total(x):
        return jnp.sum(jax.lax.fori_loop(0, k, lambda i, x: jnp.tanh(x), x))

    return plain_step(state, batch)[0], jax.grad(total)(batch["x"]).sum()


@functools.partial(jax.jit, static_argnames="k")
def _static(state, batch, k):
    return plain_step(state, batch)[0], batch["x"].sum() * k


@pytest.mark.parametrize("train_step", [_sliced, _looped, _static])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_that_needs_a_number_otherwise(mesh, state, train_step, by_name) -> None:
    """JAX's errors of these are no TypeErrors."""
    step = shardfn.fully_shard(train_step, mesh, donate=False, **OPTIONS)
    args, named = ((), {"k": 2}) if by_name else ((2,), {})
    name = train_step.__name__
    message = refuse(
        lambda: step(state, make_batch(), *args, **named),
        f"{name} asks for the value of an argument while it is traced",
        f"fully_shard(functools.partial({name}, k=2), ...).",
        what=name,
    )
    assert "unknown" not in message
    bound = functools.partial(train_step, k=2)
    shardfn.fully_shard(bound, mesh, **OPTIONS).plan(state, make_batch())


def test_an_error_of_a_step_that_can_be_traced_passes(mesh, state) -> None:
    """It is of what comes after, though the step has a number among its arguments."""

    def train_step(state, batch, scale):
        return jax.tree.map(lambda w: w * scale, state), batch["x"].sum()

    step = shardfn.fully_shard(train_step, mesh, donate=False, **OPTIONS)
    with (
        mock.patch.object(
            type(step), "as_pure", side_effect=ValueError("of something else")
        ),
        pytest.raises(ValueError, match="of something else"),
    ):
        step.lower(state, make_batch(), 2.0)
    with pytest.raises(shardfn.ShardingError, match="batch leaf") as caught:
        step(state, {"x": np.ones((3, 5), object)}, 2.0)
    assert "asks for the value" not in str(caught.value)


def test_an_error_that_binding_does_not_cure_passes(mesh, state) -> None:
    def train_step(state, batch, scale):
        return (state, {}) if batch["x"].sum() > 0 else plain_step(state, batch)

    step = shardfn.fully_shard(train_step, mesh, donate=False, **OPTIONS)
    with pytest.raises(jax.errors.TracerBoolConversionError) as plain:
        jax.jit(train_step)(state, make_batch(), 2.0)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step(state, make_batch(), 2.0)
    assert str(caught.value) == str(plain.value)  # of the user's names alone
    assert "while tracing the function train_step at " in str(caught.value)
    assert "the argument batch['x']" in str(caught.value)


def test_a_tracer_that_is_used_after_the_step_names_the_step(mesh, state) -> None:
    box = []

    def train_step(state, batch, scale):
        box.append(batch["x"].sum())
        return plain_step(state, batch)

    bound = functools.partial(train_step, scale=2.0)
    for step in train_step, bound:
        given = () if step is bound else (2.0,)
        sharded = shardfn.fully_shard(step, mesh, donate=False, **OPTIONS)
        sharded.plan(state, make_batch(), *given)
        with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
            float(box[-1])
        assert "while tracing the function train_step at " in str(caught.value)


@pytest.fixture
def flag_on(request) -> Iterator[str]:
    """Sets a JAX flag that is off by default; skips where this JAX has none."""
    if not hasattr(jax.config, request.param):
        pytest.skip(f"jax {jax.__version__} has no flag {request.param}")
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


@pytest.mark.parametrize("flag_on", FLAGS, indirect=True)
def test_flags_that_hide_jaxpr_bodies(mesh, state, flag_on) -> None:
    step = shardfn.fully_shard(with_effect(with_control_flow), mesh, **OPTIONS)
    refuse(
        lambda: step(state, make_batch()),
        f"JAX flag {flag_on} is on",
        "hides the bodies",
        f'jax.config.update("{flag_on}", False)',
    )


# How it is called


def test_no_mesh_and_no_manual_axis(state) -> None:
    with pytest.raises(shardfn.ShardingError, match="mesh") as caught:
        shardfn.fully_shard(train_step)(state, make_batch())
    assert "fully_shard(train_step, mesh)" in str(caught.value)


def test_too_few_arguments(mesh, state) -> None:
    step = shardfn.fully_shard(lambda batch, state: None, mesh, state_argnums=1)
    refuse(
        lambda: step(make_batch()),
        "was called with 1 argument, but its state is argument 1 (state_argnums=1)",
        what="<lambda>",
    )


@pytest.mark.parametrize(
    "args, named, why",
    [
        ((), {"tokens": 1}, "missing a required argument: 'batch'"),
        ((), {"tokens": 1, "batch": 1}, "got an unexpected keyword argument 'tok"),
        (({}, 1), {"batch": 1}, "multiple values for argument 'batch'"),
    ],
)
def test_names_that_are_no_arguments(good, state, args, named, why) -> None:
    refuse(
        lambda: good(state, *args, **named),
        "train_step does not take these arguments: ",
        why,
        "Its arguments are (state, batch).",
    )


def test_the_step_may_have_any_name(mesh, state) -> None:
    def update(state, batch):
        return None

    step = shardfn.fully_shard(update, mesh, **OPTIONS)
    partial = shardfn.fully_shard(functools.partial(update), mesh, **OPTIONS)
    refuse(lambda: step(state, make_batch()), "update returns no", what="update")
    refuse(lambda: partial(state, make_batch()), "update returns no", what="update")


def test_no_such_process_to_unshard_on(mesh) -> None:
    step = shardfn.fully_shard(lambda w, x: (w, ()), mesh)
    state = step.shard(jnp.ones(64))
    assert step.unshard(state, process=0).shape == (64,)
    for process in (1, -1, "0"):
        with pytest.raises(shardfn.ShardingError) as error:
            step.unshard(state, process=process)
        first, place, _ = str(error.value).split("\n")
        assert first == f"there is no process {process!r} to put the state together on."
        assert "was called at test_bad_input.py:" in place
        assert str(error.value).endswith("Pass one of 0 to 0.")


# What is said of a step that is right


def test_a_mesh_axis_that_nothing_is_split_over_is_said() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    step = shardfn.fully_shard(lambda w, x: (w + jnp.sum(x), ()), mesh, min_size=0)
    says = "nothing is split over mesh axis 'model': its 2 devices all compute the same"
    with pytest.warns(shardfn.UnusedAxisWarning, match=says):
        plan = step.plan(jnp.ones(8), jnp.ones(8))
    assert "model" in str(plan) and "model=2 unused" in repr(step)


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, "the largest has 8 elements, and min_size=16384"),
        (
            {"min_size": 0, "shard": False},
            "shard= leaves them whole, or no dimension can be split",
        ),
    ],
)
def test_a_state_of_which_nothing_is_sharded_is_said(options, why) -> None:
    step = shardfn.fully_shard(
        lambda w, x: (w + jnp.sum(x), ()), jax.make_mesh((8,), ("data",)), **options
    )
    notes = step.plan(jnp.ones(8), jnp.ones(8)).notes
    assert f"no leaf of the state is sharded: {why}" in notes
