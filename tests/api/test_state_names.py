"""In: steps with several state arguments. Out: a leaf has the same name in plans, in
options, and in every method that takes or makes its state, however it comes.
"""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from sharded_and_plain import make_mesh

import shardfn
from shardfn import ShardingError
from shardfn.storage.checkpoint import Checkpoints
from shardfn.storage.safetensors import load_safetensors, write_safetensors
from shardfn.testing import assert_parity

SQUARE = np.eye(8, dtype=np.float32)
TRAINED = {"w": SQUARE, "moments": (2 * SQUARE, 3 * SQUARE)}
FROZEN = {"w": 4 * SQUARE, "base": 5 * SQUARE}
X = np.ones((8, 8), np.float32)


def new(trained, frozen, x):
    def loss(w):
        return jnp.tanh(x @ (w + frozen["w"] + frozen["base"])).sum()

    one, two = trained["moments"]
    w = trained["w"] - jax.grad(loss)(trained["w"])
    return {"w": w, "moments": (two, one + 1)}, x.sum()


def step(trained, frozen, x):
    return new(trained, frozen, x)


def swapped(x, frozen, trained):
    return new(trained, frozen, x)


def unnamed(*args):
    return new(*args)


class Model:
    def step(self, trained, frozen, x):
        return new(trained, frozen, x)


def both(trained, frozen, x):
    """Both come back, so that a call finds that they are state."""
    out, metrics = new(trained, frozen, x)
    return out, {"w": frozen["w"] * 2, "base": frozen["base"] + 1}, metrics


KINDS = [
    pytest.param(step, (0, 1), (TRAINED, FROZEN, X), ("trained", "frozen"), id="step"),
    pytest.param(
        swapped, (1, 2), (X, FROZEN, TRAINED), ("frozen", "trained"), id="swapped"
    ),
    pytest.param(unnamed, (0, 1), (TRAINED, FROZEN, X), ("0", "1"), id="unnamed"),
    pytest.param(
        Model().step, (0, 1), (TRAINED, FROZEN, X), ("trained", "frozen"), id="method"
    ),
    pytest.param(
        both, "auto", (TRAINED, FROZEN, X), ("trained", "frozen"), id="both, found"
    ),
]


def sharded(fn: Callable, argnums=(0, 1), **options) -> shardfn.ShardedStep:
    return shardfn.fully_shard(
        fn, make_mesh("4"), state_argnums=argnums, min_size=0, donate=False, **options
    )


def whole_leaves(tree) -> list[bool]:
    """Which leaves every device has."""
    shardings = [getattr(x, "sharding", x) for x in jax.tree.leaves(tree)]
    return [sharding.spec == P() for sharding in shardings]


@pytest.mark.parametrize("fn, argnums, args, names", KINDS)
def test_a_leaf_has_one_name(fn, argnums, args, names) -> None:
    """It is asked of one leaf that every device has it, by its name in the plan."""
    states = {n: s for n, s in zip(names, (a for a in args if a is not X), strict=True)}
    named = [f"{n}/{leaf}" for n in names for leaf in paths(states[n])]
    for name in named:
        asked = sharded(fn, argnums, shard={name: False})
        planned = asked.plan(*args)  # of a step whose states are found, now they are
        assert "shard=False asks for it" in str(planned.explain(name))
        expected = [name == other for other in named]
        by_name, each = dict(states), tuple(states.values())
        per_state = np.split(expected, [len(paths(each[0]))])
        for both_at_once in (
            asked.init(lambda: by_name),  # noqa: B023
            asked.init(lambda: each, argument=names),  # noqa: B023
            asked.shard(by_name),
            asked.shard(each, argument=names),
            asked.shardings(by_name),
            asked.shardings(asked.abstract(lambda: by_name)),  # noqa: B023
        ):
            found = whole_leaves(both_at_once)
            if isinstance(both_at_once, dict):  # in the order of its keys
                found = [x for n in names for x in whole_leaves(both_at_once[n])]
            assert found == expected, name
        for argument, state, own in zip(names, each, per_state, strict=True):
            for one in (
                asked.init(lambda: state, argument=argument),  # noqa: B023
                asked.shard(state, argument=argument),
                asked.shardings(state, argument=argument),
                asked.shard(state),  # as it was planned
            ):
                assert whole_leaves(one) == list(own), name
            stored = asked.shard(state, argument=argument)
            assert jax.tree.structure(asked.unshard(stored)) == jax.tree.structure(
                state
            )
        out = asked(*[asked.shard(a) if a is not X else a for a in args])
        assert whole_leaves(out[0]) == list(per_state[names.index(trained(names))])


def trained(names: tuple[str, ...]) -> str:
    return "trained" if "trained" in names else "0"


def paths(state) -> list[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]


@pytest.mark.parametrize("number", [int, np.int64, np.uint8, np.array])
def test_positions_name_arguments_too(number) -> None:
    """Any integers, as NumPy's."""
    one, two = number(1), number(2)
    asked = sharded(swapped, (1, 2), shard={"frozen": False})
    assert all(whole_leaves(asked.shard(FROZEN, argument=one)))
    assert all(whole_leaves(asked.init(lambda: FROZEN, argument=one)))
    described = asked.abstract(lambda: FROZEN, argument=one)
    assert all(whole_leaves(jax.tree.map(lambda x: x.sharding, described)))
    assert all(whole_leaves(asked.shardings(FROZEN, argument=one)))
    assert not any(whole_leaves(asked.shard(TRAINED, argument=two)))
    stored = asked.shard([FROZEN, TRAINED], argument=[one, two])
    assert all(whole_leaves(stored[0])) and not any(whole_leaves(stored[1]))
    assert type(stored) is list


def test_one_state_is_called_by_its_paths() -> None:
    """The argument's name is no part of them, and naming it changes nothing."""
    asked = sharded(lambda state, x: new(state, FROZEN, x), 0, shard={"w": False})
    for stored in (asked.shard(TRAINED), asked.shard(TRAINED, argument="state")):
        assert stored["w"].sharding.spec == P()
        assert stored["moments"][0].sharding.spec == P("data")


def test_nothing_is_asked_where_options_do_not_depend_on_it() -> None:
    for options in ({}, {"shard": False}, {"shard": {"*base": False}}):
        asked = sharded(step, **options)
        for state in (TRAINED, FROZEN):
            made = asked.shard(state), asked.init(lambda: state)  # noqa: B023
            assert jax.tree.map(np.array_equal, *made)
        asked.init(lambda: (TRAINED, FROZEN))
        made = asked.shard({"base": SQUARE})
        assert whole_leaves(made) == [bool(options)]


def test_it_is_asked_which_state_a_tree_is() -> None:
    asked = sharded(step, shard={"frozen/w": False})
    with pytest.raises(shardfn.ShardingError) as raised:
        asked.shard({"w": SQUARE})
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "it cannot be told which state of step this is, of 'trained', 'frozen', and "
        "options ask different things of them."
    )
    assert lines[1] == "  a leaf of it would be 'trained/w' or 'frozen/w'"
    assert lines[2].startswith("  step.shard was called at test_state_names.py:")
    assert lines[3] == (
        "Say which it is: argument='trained' or argument='frozen'. Or pass all of them "
        "at once, in a dictionary by these names."
    )
    # An optimizer's state may be a tuple of as many trees as there are states.
    asked = sharded(step, shard={"trained": False})
    with pytest.raises(
        shardfn.ShardingError, match=r"argument=\('trained', 'frozen'\)"
    ):
        asked.init(lambda: (SQUARE, SQUARE))
    pair = asked.init(lambda: (SQUARE, SQUARE), argument="frozen")
    assert not any(whole_leaves(pair))


@pytest.mark.parametrize(
    "argument, message",
    [
        ("x", "argument='x' is no state argument of step: 'x' is not one of"),
        (2, "argument=2 is no state argument of step: 2 is not one of 'trained', 'f"),
        (-1, "argument=-1 is no state argument of step: -1 is not one of"),
        (True, "argument=True is no state argument of step: True is not one of"),
        (1.0, "argument=1.0 is no state argument of step: 1.0 is not one of"),
        (np.int64(2), "argument=np.int64(2) is no state argument of step: np.int64(2)"),
        (np.True_, "argument=np.True_ is no state argument of step: np.True_ is not"),
        (np.arange(2), "argument=array([0, 1]) is no state argument of step: array"),
        (("trained", "x"), "is no state argument of step: 'x' is not one of"),
        (("trained",), "names 1 states, and the state is no tuple of as many"),
        ((), "argument=() names 0 states, and the state is no tuple of as many"),
    ],
)
def test_arguments_that_are_no_states(argument, message) -> None:
    for asked in (sharded(step), sharded(step, shard={"frozen": False})):
        for call in (
            lambda: asked.shard(FROZEN, argument=argument),  # noqa: B023
            lambda: asked.init(lambda: FROZEN, argument=argument),  # noqa: B023
            lambda: asked.abstract(lambda: FROZEN, argument=argument),  # noqa: B023
            lambda: asked.shardings(FROZEN, argument=argument),  # noqa: B023
        ):
            with pytest.raises(shardfn.ShardingError) as raised:
                call()
            assert message in str(raised.value)
            assert "test_state_names.py" in str(raised.value)


def test_states_that_are_not_found_yet() -> None:
    asked = sharded(both, "auto", shard={"frozen/base": False})
    with pytest.raises(shardfn.ShardingError) as raised:
        asked.shard(FROZEN, argument="frozen")
    assert (
        "argument='frozen' names a state argument of both, and which of its arguments "
        "are state is found when it is first called or planned."
    ) in str(raised.value)
    with pytest.raises(shardfn.ShardingError) as raised:
        asked.shard(FROZEN)
    assert (
        "If argument 'frozen' of both is a state of its own, say so with "
        "state_argnums=: leaves are then called after it from the start."
    ) in str(raised.value)


def test_leaves_of_other_states_may_be_named() -> None:
    """A pattern that names none of a state's leaves may be of another's; the plan sees
    all of them."""
    asked = sharded(step, shard={"frozen/base": False, "trained/nothing": False})
    asked.shard(TRAINED, argument="trained")
    with pytest.raises(shardfn.ShardingError, match="'trained/nothing', which matches"):
        asked.shard({"trained": TRAINED, "frozen": FROZEN})
    with pytest.raises(shardfn.ShardingError, match="'trained/nothing', which matches"):
        asked.plan(TRAINED, FROZEN, X)


def test_errors_call_leaves_by_their_names() -> None:
    asked = sharded(step)
    abstract = jax.eval_shape(lambda: FROZEN)
    with pytest.raises(shardfn.ShardingError, match="^state leaf 'frozen/base' is a"):
        asked.shard(abstract, argument="frozen")
    with pytest.raises(shardfn.ShardingError, match="^state leaf 'frozen/base' is a"):
        asked(TRAINED, abstract, X)


@pytest.mark.parametrize(
    "options",
    [
        {"shard": {"frozen/w": False, "trained/moments": False}},
        {"reshard_after_forward": {"frozen/base": False}},
        {"offload": {"trained/moments": "host"}},
        {"gather_dtype": {"frozen": "bfloat16"}},
    ],
    ids=str,
)
def test_parity(options) -> None:
    tol = 0.1 if "gather_dtype" in options else None
    given = {"state_argnums": (0, 1), **options}
    if tol is None:
        assert_parity(step, make_mesh("4"), TRAINED, FROZEN, X, **given)
    else:
        assert_parity(step, make_mesh("4"), TRAINED, FROZEN, X, tol=tol, **given)


def test_a_chosen_memory_is_known_by_the_name() -> None:
    """What `offload` left to the plan is found again for a state that comes alone."""
    asked = sharded(step, offload="0.6KiB")
    asked.plan(TRAINED, FROZEN, X)
    kinds = {
        x.sharding.memory_kind
        for state in (TRAINED, FROZEN)
        for x in jax.tree.leaves(asked.shard(state))
    }
    assert "pinned_host" in kinds


def test_rows_of_devices() -> None:
    asked = sharded(step, per_device_state=("trained/moments",))
    made = asked.init(lambda: TRAINED, argument="trained")
    assert [x.shape for x in made["moments"]] == [(4, 8, 8)] * 2
    assert made["w"].shape == (8, 8)
    assert asked.shard(FROZEN, argument="frozen")["w"].shape == (8, 8)


def test_files_have_the_paths_of_what_was_saved(tmp_path: Path) -> None:
    """They do not depend on the step, and are stored as it stores them."""
    asked = sharded(step, shard={"frozen/base": False})
    asked.abstract(lambda: {"trained": TRAINED, "frozen": FROZEN})
    stored = asked.shard(FROZEN)
    with Checkpoints(tmp_path / "of the step", asked) as checkpoints:
        checkpoints.save(1, stored)
        restored = checkpoints.restore(jax.eval_shape(lambda: FROZEN))
    assert whole_leaves(restored) == [True, False]
    with Checkpoints(tmp_path / "of the step") as checkpoints:
        plain = checkpoints.restore(FROZEN)
    jax.tree.map(np.testing.assert_array_equal, plain, FROZEN)
    assert write_safetensors(tmp_path / "x.safetensors", stored, asked) == ["base", "w"]
    loaded = load_safetensors(tmp_path / "x.safetensors", stored, asked)
    assert whole_leaves(loaded) == [True, False]


def test_a_part_that_was_named_is_saved_and_restored_as_it_is(tmp_path: Path) -> None:
    """In a process that has seen no other state, such as one that trains adapters."""
    first, second = (sharded(step, shard={"frozen": False}) for _ in range(2))
    part = first.shard(FROZEN, argument="frozen")
    assert all(whole_leaves(part))
    with Checkpoints(tmp_path / "kept", first) as checkpoints:
        checkpoints.save(0, part)
    write_safetensors(tmp_path / "part.safetensors", part, first)
    made = second.abstract(lambda: FROZEN, argument="frozen")
    with Checkpoints(tmp_path / "kept", second) as checkpoints:
        restored = checkpoints.restore(made)
    loaded = load_safetensors(tmp_path / "part.safetensors", made, second)
    for tree in (restored, loaded):
        assert all(whole_leaves(tree))
        jax.tree.map(np.testing.assert_array_equal, tree, FROZEN)
    # A whole state that is like it may be another one.
    with pytest.raises(ShardingError, match="cannot be told which state"):
        second.shard(FROZEN)


def test_a_state_with_the_names_of_all_is_one_if_it_came_as_one() -> None:
    """Its keys are those of a dictionary of all states."""

    def fn(trained, frozen, x):
        return jax.tree.map(lambda w: w + 1, trained), x.sum() + frozen["base"].sum()

    alike = {"trained": SQUARE, "frozen": 2 * SQUARE}
    made = sharded(fn, shard={"frozen": False})
    assert whole_leaves(made.shardings(alike)) == [True, False]  # sorted by name
    made.plan(alike, FROZEN, X)
    assert whole_leaves(made.shardings(alike)) == [False, False]


def test_a_step_inside_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
    local = shardfn.fully_shard(
        step, state_argnums=(0, 1), min_size=0, shard={"frozen/base": False}
    )
    with pytest.raises(shardfn.ShardingError, match="it cannot be told which state"):
        local.specs(FROZEN, mesh)
    own = local.specs(TRAINED, mesh, argument="trained")
    frozen = local.specs(FROZEN, mesh, argument="frozen")
    assert frozen == {"w": P("data"), "base": P()}
    both_at_once = local.specs({"trained": TRAINED, "frozen": FROZEN}, mesh)
    assert both_at_once == {"trained": own, "frozen": frozen}

    def run(trained, frozen, x):
        trained = local.shard(trained, argument="trained")
        frozen = local.init(lambda: frozen, argument="frozen")
        return local(trained, frozen, x)[0]

    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=own)
    )
    out, expected = mapped(TRAINED, FROZEN, X), step(TRAINED, FROZEN, X)[0]
    for x, other in zip(*map(jax.tree.leaves, (out, expected)), strict=True):
        np.testing.assert_allclose(x, other, atol=1e-5)
