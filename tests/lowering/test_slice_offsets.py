"""In: scanned steps compiled for H100s that are not there, with and without leaves on
the host. Out: that each iteration reads and writes its own part of every stack.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest
from compilers import aot
from jax.ad_checkpoint import checkpoint_name

import shardfn
from shardfn._core.host_values import NO_OFFSETS
from shardfn._core.reading_limits import OFFSET_ITERATIONS
from shardfn.analysis import targets
from shardfn.analysis._hlo.offsets import Offset, offsets
from shardfn.analysis._offset_check import check_offsets

pytestmark = pytest.mark.standard_promotion
H100S = "h100:4"
LLAMA = "llama_scan_remat"
HOST = {"offload": {"*": "host"}}

BACKWARDS = """HloModule backwards

%body (p: (s32[], f32[3,4])) -> (s32[], f32[3,4]) {
  %p = (s32[], f32[3,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[3,4]{1,0} get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %zero = s32[] constant(0)
  %back = s32[] subtract(%two, %i)
  %part = f32[1,4]{1,0} dynamic-slice(%stack, %back, %zero), dynamic_slice_sizes={1,4}, backend_config={"dynamic_slice_config":{"loop_index":"0",SAID}}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %all = (s32[], f32[3,4]{1,0}) tuple(%next, %stack)
}

%condition (p: (s32[], f32[3,4])) -> pred[] {
  %p = (s32[], f32[3,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %three), direction=LT
}

ENTRY %main (stack: f32[3,4]) -> f32[3,4] {
  %stack = f32[3,4]{1,0} parameter(0)
  %first = s32[] constant(0)
  %given = (s32[], f32[3,4]{1,0}) tuple(%first, %stack)
  %loop = (s32[], f32[3,4]{1,0}) while(%given), condition=%condition, body=%body
  ROOT %out = f32[3,4]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


@pytest.mark.parametrize(
    "said",
    ['"byte_offset":"32","byte_stride":"-16"', '"linear":{"byte_offset":"32",'],
)
def test_where_a_loop_that_runs_backwards_reads(said: str) -> None:
    if "linear" in said:  # as JAX 0.12 writes it
        said = f'{said}"byte_stride":"-16"}},"byte_offset":"0","byte_stride":"0"'
    right = offsets(BACKWARDS.replace("SAID", said))
    assert [o.true for o in right] == [o.said for o in right] == [32, 16, 0]
    assert not any(o.wrong for o in right)


def test_where_it_does_not() -> None:
    forwards = '"byte_offset":"0","byte_stride":"16"'
    wrong = offsets(BACKWARDS.replace("SAID", forwards))
    about = {"instruction": "part", "writes": False, "op_name": ""}
    assert wrong[0] == Offset(**about, iteration=0, said=0, true=32)
    [line] = check_offsets(BACKWARDS.replace("SAID", forwards))
    assert line == (
        "misplaced: in iteration 0 a part of a stack is read at byte 0, where its "
        "indices say 32, at part; compile with "
        "xla_disable_hlo_passes=dynamic-slice-annotator"
    )


def test_indices_that_the_text_does_not_tell_are_no_finding() -> None:
    said = '"byte_offset":"0","byte_stride":"16"'
    text = BACKWARDS.replace("constant(2)", "custom-call()").replace("SAID", said)
    assert [o.true for o in offsets(text)] == [None] * 3
    assert check_offsets(text) == ()


def test_of_long_loops_the_last_iteration_is_looked_at() -> None:
    """XLA does not clamp what it works out, and so goes wrong there alone."""
    text = BACKWARDS.replace("3,4", "99,4").replace("constant(3)", "constant(99)")
    text = text.replace("subtract(%two, %i)", "add(%one, %i)").replace(
        "SAID", '"byte_offset":"16","byte_stride":"16"'
    )
    found = offsets(text)
    assert [o.iteration for o in found] == [*range(OFFSET_ITERATIONS), 98]
    assert [o.iteration for o in found if o.wrong] == [98]


INDEX, PART = "%back = s32[] subtract(%two, %i)", "dynamic-slice(%stack, %back, %zero)"
UPDATE = "dynamic-update-slice(%stack, %new, %back, %zero)"
NEW = "%new = f32[1,4]{1,0} broadcast(%zero), dimensions={}"
UNSIGNED = """%j = u32[] convert(%i)
  %less = u32[] constant(4294967295)
  %sum = u32[] add(%j, %less)
  %back = s32[] convert(%sum)"""
CLAMPED = """%last = s32[] constant(1)
  %back = s32[] clamp(%zero, %i, %last)"""
FUSED = """
%fused (p0: f32[3,4], p1: s32[]) -> f32[1,4] {
  %p0 = f32[3,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %none = s32[] constant(0)
  ROOT %part = f32[1,4]{1,0} dynamic-slice(%p0, %p1, %none), dynamic_slice_sizes={1,4}, backend_config={"dynamic_slice_config":{"loop_index":"0",SAID}}
}

%body"""  # noqa: E501
WRITTEN = {
    "plain": ({}, [32, 16, 0]),
    "columns": ({"[3,4]{1,0}": "[3,4]{0,1}"}, [8, 4, 0]),
    "of two bytes": ({"f32": "bf16"}, [16, 8, 0]),
    "of half a byte": ({"f32": "s4"}, [4, 2, 0]),
    "clamped": ({INDEX: CLAMPED}, [0, 16, 16]),
    "wrapped around": ({INDEX: UNSIGNED}, [0, 0, 16]),
    "halved": ({INDEX: "%back = s32[] divide(%i, %two)"}, [0, 0, 16]),
    "an update": ({INDEX: f"{INDEX}\n  {NEW}", PART: UPDATE}, [32, 16, 0]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_where_indices_say_that_parts_begin(name: str) -> None:
    changes, expected = WRITTEN[name]
    text = BACKWARDS.replace("SAID", '"byte_offset":"0","byte_stride":"0"')
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert [o.true for o in offsets(text)] == expected


def test_parts_in_what_a_loop_calls_are_found() -> None:
    """In a fusion, in a loop in a loop, and in a loop in a branch."""
    said = '"byte_offset":"32","byte_stride":"-16"'
    line = next(text for text in BACKWARDS.splitlines() if "%part =" in text)
    call = "  %part = f32[1,4]{1,0} fusion(%stack, %back), kind=kLoop, calls=%fused"
    text = BACKWARDS.replace(line, call).replace("%body", FUSED, 1)
    assert [o.true for o in offsets(text.replace("SAID", said))] == [32, 16, 0]
    entry = BACKWARDS[BACKWARDS.index("ENTRY") :]
    branch = entry.replace("ENTRY %main", "%branch")
    within = """ENTRY %main (stack: f32[3,4]) -> f32[3,4] {
  %stack = f32[3,4]{1,0} parameter(0)
  %which = s32[] custom-call()
  ROOT %out = f32[3,4]{1,0} conditional(%which, %stack, %stack), branch_computations={%branch, %branch}
}
"""  # noqa: E501
    text = BACKWARDS.replace(entry, branch + "\n" + within).replace("SAID", said)
    assert [o.true for o in offsets(text)] == [32, 16, 0] * 2


@pytest.mark.parametrize(
    "said, expected",
    [
        ('"table":{"offsets":["32","16","0"]}', [32, 16, 0]),
        ('"byte_stride":"16"', [0, 16, 32]),
        ('"other":{"of":{"another":"kind"}}', [None] * 3),
        ('"loop_index":"1","byte_offset":"0"', [None] * 3),
    ],
)
def test_how_xla_says_where_they_begin(said: str, expected: list[int | None]) -> None:
    assert [o.said for o in offsets(BACKWARDS.replace("SAID", said))] == expected


def momentum(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """A step over layers in a scan, each of two products."""

    @jax.checkpoint
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def loss(params: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    means = jax.tree.map(lambda m, g: 0.9 * m + g, state["means"], grads)
    params = jax.tree.map(lambda p, m: p - m, state["params"], means)
    return {"params": params, "means": means}, value


def case(name: str) -> tuple[Callable[..., Any], Any, Any]:
    """A step and its arguments' types: the small one, or one of tests/programs."""
    if name != "momentum":
        program = programs.get(name)
        state = jax.eval_shape(program.init, jax.random.key(0))
        return program.step, state, jax.eval_shape(lambda: program.batch(0))
    stack = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    state = {k: {"up": stack, "down": stack} for k in ("params", "means")}
    return momentum, state, jax.ShapeDtypeStruct((16, 64), jnp.float32)


def compiled(name: str, **options: Any) -> tuple[shardfn.Plan, str]:
    """The plan and the text of a program for H100s."""
    plain, *args = case(name)
    step = shardfn.fully_shard(plain, targets.mesh(H100S), min_size=8, **options)
    return step.plan(*args), step.lower(*args).compile().as_text() or ""


@pytest.mark.parametrize(
    "_, name, options",
    [
        aot(H100S, "momentum", {}),
        aot(H100S, "momentum", {"prefetch": 1}),
        aot(H100S, "momentum", {"reshard_after_forward": False}),
        aot(H100S, LLAMA, {}, exhaustive=True),
        aot(H100S, LLAMA, {"prefetch": 1}, exhaustive=True),
        aot(H100S, LLAMA, {"prefetch": "first"}, exhaustive=True),
        aot(H100S, LLAMA, {"reshard_after_forward": False}, exhaustive=True),
    ],
)
def test_xla_knows_where_parts_begin(
    _: str, name: str, options: dict[str, Any]
) -> None:
    """Where nothing is on the host, XLA's own offsets are right, and are left to it."""
    plan, text = compiled(name, **options)
    found = offsets(text)
    assert found and all(o.said is not None and o.true is not None for o in found)
    assert plan.verify(text).misplaced == ()


NAMES = [aot(H100S, "momentum"), aot(H100S, LLAMA, exhaustive=True)]


@pytest.mark.parametrize("_, name", NAMES)
def test_xla_does_not_work_them_out_for_leaves_on_the_host(_: str, name: str) -> None:
    """What it would is wrong: the gradients of two layers change places."""
    plan, text = compiled(name, **HOST)
    assert plan.verify(text).ok
    assert "dynamic-slice-start" in text and "S(5)" in text
    assert "dynamic_slice_config" not in text


@pytest.mark.parametrize("_, name", NAMES)
def test_without_the_option_they_are_wrong(_: str, name: str) -> None:
    """Once this fails, XLA is right, and `NO_OFFSETS` can go."""
    left_out = {NO_OFFSETS[0]: None}
    plan, text = compiled(name, **HOST, compiler_options=left_out)
    checked = plan.verify(text)
    assert not checked.ok
    assert "misplaced: in iteration 0 a part of a stack is " in checked.problems()
    assert checked.misplaced[0] in str(checked)


def own_copies(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    """A step that keeps its activations on the host by itself."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(checkpoint_name(h @ w, "product")), None

    keep = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["product"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params: Any) -> jax.Array:
        body = jax.checkpoint(layer, policy=keep)
        return jnp.mean(jax.lax.scan(body, batch, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.mark.aot(H100S)
def test_what_a_step_keeps_on_the_host_by_itself_counts() -> None:
    step = shardfn.fully_shard(own_copies, targets.mesh(H100S), min_size=8)
    args = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jnp.ones((16, 64))
    lowered = step.lower(*args)
    assert NO_OFFSETS in step.on(H100S, *args).compiler_options
    assert "dynamic_slice_config" not in (lowered.compile().as_text() or "")
    assert NO_OFFSETS[0] not in step.compiler_options


@pytest.mark.aot(H100S)
def test_a_step_in_another_program_says_what_that_needs() -> None:
    plain, state, batch = case("momentum")
    step = shardfn.fully_shard(plain, targets.mesh(H100S), min_size=8, **HOST)
    for _ in range(2):  # each program of its own
        with pytest.warns(shardfn.OffloadWarning) as said:
            jax.eval_shape(lambda state, batch: step(state, batch), state, batch)
        [message] = {str(warning.message) for warning in said}
    name, value = NO_OFFSETS
    assert "has values in the host's memory, and is part of another program" in message
    assert f"Pass compiler_options={{'{name}': '{value}'}} to the jax.jit" in message
    assert "momentum was called at test_slice_offsets.py:" in message
    none = {"compiler_options": {name: None}}
    step = shardfn.fully_shard(plain, targets.mesh(H100S), min_size=8, **HOST, **none)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardfn.OffloadWarning)
        jax.eval_shape(lambda state, batch: step(state, batch), state, batch)
