"""In: which parts of the state are sharded over which mesh axes. Out: what is stored,
what moves, and the plain step's numbers to the bit.
"""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from plan_helpers import Sharded, compiled_moves, cpu_mesh, planned_moves, shard_fn

import shardfn
from shardfn._core.control import make_control

PARAMS = {"up": (16, 32), "down": (32, 16)}
STATE = {"params": PARAMS, "momentum": PARAMS}
BOTH = ("replica", "data")


def loss_fn(params, x):
    return jnp.sum((x @ params["up"]) @ params["down"])


def descend(state, grads):
    momentum = jax.tree.map(lambda m, g: 2 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - m, state["params"], momentum)
    return {"params": params, "momentum": momentum}


def step(state, x):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
    return descend(state, grads), loss


def microbatches(state, x):
    def accumulate(total, part):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], part)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, state["params"])
    grads, losses = lax.scan(accumulate, zeros, x.reshape(4, -1, 16))
    return descend(state, grads), losses


def sharded(shard: Any, *sizes: int, fn: Any = step, **options: Any) -> Sharded:
    axis = BOTH if len(sizes) > 1 else "data"
    mesh = cpu_mesh(*sizes)
    return shard_fn(fn, mesh, STATE, (32, 16), axis=axis, shard=shard, **options)


def moves(case: Sharded, leaf: str = "up") -> dict[tuple[str, str, str], int]:
    """How often a step moves a parameter or its gradient, by phase, move and axis."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in case.plan.collectives:
        if line.path.endswith(leaf):
            found[line.phase, line.op, line.axis] += line.times or 0
    return dict(found)


def assert_exact(case: Sharded, integers: Any) -> None:
    """What is planned is compiled, and integers come out as in the plain step."""
    assert compiled_moves(case.compile()) == planned_moves(case.plan)
    state = jax.tree.map(lambda s: integers(s.shape), case.state)
    x = integers((32, 16))
    expected = jax.jit(case.plain)(state, x)
    stored = case.step.shard(state)
    assert jax.tree.map(lambda a: a.sharding, stored) == case.step.shardings(case.state)
    new, loss = case.step(stored, x)
    got = case.step.unshard(new), loss
    jax.tree.map(np.testing.assert_array_equal, expected, got)


ZERO_2 = {"params": False}
UPDATE_GATHERS = {("update", "all_gather", "data"): 1}


def test_optimizer_state_alone_is_zero_2(integers) -> None:
    """Gradients are scattered, new parameters gathered, and nothing else moves."""
    case = sharded(ZERO_2, 8)
    for leaf in PARAMS:
        scattered = {("backward", "psum_scatter", "data"): 1}
        assert moves(case, leaf) == scattered | UPDATE_GATHERS
    specs = jax.tree.map(lambda s: s.spec, case.step.shardings(case.state))
    assert specs["params"] == {"up": P(), "down": P()}
    assert specs["momentum"] == {"up": P(None, "data"), "down": P("data")}
    assert_exact(case, integers)


@pytest.mark.parametrize("asked, times", [("defer", 1), ("scatter", 4)])
def test_deferred_it_is_zero_1(asked: str, times: int, integers) -> None:
    case = sharded(ZERO_2, 4, fn=microbatches, accumulate=asked)
    scattered = {("backward", "psum_scatter", "data"): times}
    assert moves(case) == scattered | UPDATE_GATHERS
    assert_exact(case, integers)


def test_nothing_sharded_all_reduces_gradients(integers) -> None:
    case = sharded(False, 4)
    assert moves(case) == {("backward", "all_reduce", "data"): 1}
    assert {c.op for c in case.plan.collectives} == {"all_reduce"}
    assert_exact(case, integers)


def test_inner_parameters_and_outer_optimizer_state(integers) -> None:
    """Gathered over the inner axis, updated over both: shards of shards."""
    case = sharded({"momentum": BOTH}, 2, 4)
    assert moves(case) == {
        ("forward", "all_gather", "data"): 1,
        ("backward", "psum_scatter", "data"): 1,
        ("backward", "psum_scatter", "replica"): 1,
        ("update", "all_gather", "replica"): 1,
    }
    by_axis = {
        c.axis: c.wire_bytes for c in case.plan.collectives if c.op == "psum_scatter"
    }
    size = 4 * 16 * 32
    assert by_axis == {"data": size * 3 // 4, "replica": size // 4 // 2}
    specs = jax.tree.map(lambda s: s.spec, case.step.shardings(case.state))
    assert specs["params"]["up"] == P(None, "data")
    assert specs["momentum"]["up"] == P("replica", "data")
    assert_exact(case, integers)


def test_everything_over_both_axes(integers) -> None:
    case = sharded(BOTH, 2, 4)
    sent = {(c.op, c.axis): c.wire_bytes for c in case.plan.collectives if c.path}
    size = 4 * 16 * 32
    assert sent == {
        ("all_gather", "replica"): size // 4 // 2,
        ("all_gather", "data"): size * 3 // 4,
        ("psum_scatter", "data"): size * 3 // 4,
        ("psum_scatter", "replica"): size // 4 // 2,
    }
    assert_exact(case, integers)


def test_a_leaf_with_one_dimension_is_split_over_one_axis() -> None:
    case = shard_fn(
        lambda w, x: (w + x.sum(), x.sum()), cpu_mesh(2, 4), (64,), (8,),
        axis=BOTH, shard=BOTH,
    )  # fmt: skip
    assert case.step.shardings(case.state).spec == P("data")


def test_axes_that_the_step_is_not_sharded_over_are_refused() -> None:
    message = r"shard=\('model',\) names mesh axis 'model', but .* axis=\('data',\)"
    with pytest.raises(shardfn.ShardingError, match=message):
        sharded({"params": "model"}, 4)


@pytest.mark.parametrize(
    "option, value, allowed",
    [
        (
            "shard",
            3,
            "a mesh axis, a tuple of mesh axes, a mapping from mesh axes to the",
        ),
        ("reshard_after_forward", "yes", "True, False, 'auto', a number of devices"),
        ("reshard_after_forward", 0, "True, False, 'auto', a number of devices"),
        (
            "gather_dtype",
            "int4",
            "None, a floating-point dtype such as 'bfloat16', 'int8'",
        ),
        ("reduce_dtype", "float33", "None, a floating-point dtype"),
        ("accumulate", True, "'auto', 'scatter', 'defer'"),
        ("prefetch", -1, "an integer that is not negative"),
        ("bucket_bytes", "1M", "an integer that is not negative"),
        ("prefetch", {"params": "all"}, "an integer that is not negative"),
    ],
)
def test_values_that_an_option_does_not_have(option, value, allowed) -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        shardfn.fully_shard(step, cpu_mesh(4), **{option: value})
    message = str(caught.value)
    given = value["params"] if isinstance(value, dict) else value
    asked = f"{option}['params']" if isinstance(value, dict) else option
    assert message.startswith(f"{asked} cannot be {given!r}.\n")
    assert "fully_shard was called at test_shard.py:" in message
    assert f"Pass {allowed}" in message


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = sharded(None, 4, reshard_after_forward={"param/*": True}).plan
    message = str(caught.value)
    assert "reshard_after_forward names 'param/*', which matches no leaf" in message
    assert "'momentum/down', 'momentum/up', 'params/down', 'params/up'" in message
    assert "\nDid you mean 'params/*'" in message
    assert re.search(r"\n  fully_shard was called at plan_helpers\.py:\d+ ", message)


@pytest.mark.parametrize(
    "pattern, close",
    [
        ("params/donw", "'params/down'"),
        ("parms", "'params'"),
        ("up", "'*/up'?"),
        ("momentm/*", "'momentum/*'"),
        ("xyz", None),
    ],
)
def test_a_typo_has_the_close_names_first(pattern: str, close: str | None) -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = sharded(None, 4, prefetch={pattern: 1}).plan
    last = str(caught.value).splitlines()[-1]
    assert last.startswith(f"Did you mean {close}" if close else "The leaves are 'mom")


@pytest.mark.parametrize("wide", ["*", "params", "p*/*"])
def test_a_pattern_behind_a_wider_one_is_refused(wide: str) -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        _ = sharded(None, 4, prefetch={wide: 1, "params/down": 0}).plan
    message = str(caught.value)
    assert message.startswith(
        f"prefetch names 'params/down' after '{wide}', which has all of its leaves: "
    )
    assert re.search(r"\n  fully_shard was called at plan_helpers\.py:\d+ ", message)
    assert message.endswith("\nName 'params/down' first.")


def test_groups_of_one_device_are_not_the_whole_mesh() -> None:
    """1 equals True, and says the contrary."""
    asked = {"*": True, "params/down": 1}
    with pytest.raises(shardfn.ShardingError, match="names 'params/down' after '\\*'"):
        _ = sharded(None, 4, reshard_after_forward=asked).plan
    whole, again, kept = (
        make_control(reshard_after_forward=value) for value in (1, True, False)
    )
    assert whole == kept != again


def test_a_pattern_for_the_rest_may_be_left_with_nothing() -> None:
    ask = {"params": 1, "params/down": 1, "momentum": 0, "*": 2}
    assert sharded(None, 4, prefetch=ask).plan.collectives


def test_a_pattern_is_a_string() -> None:
    with pytest.raises(
        shardfn.ShardingError, match="a pattern of prefetch cannot be 0"
    ):
        shardfn.fully_shard(step, cpu_mesh(4), prefetch={0: 1})


def test_options_that_say_the_same_are_one_plan() -> None:
    plans = [
        sharded(None, 4, prefetch=value).plan for value in (0, {"*": 0}, {"params": 1})
    ]
    assert plans[0] == plans[1] != plans[2]


def test_the_options_of_all_overloads_are_those_of_the_function() -> None:
    import inspect

    from shardfn._api.options import Options

    parameters = inspect.signature(shardfn.fully_shard).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords == set(Options.__annotations__)
