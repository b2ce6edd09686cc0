"""In: compiled programs, and HLO texts written out by hand, with arrays in the host's
memory. Out: what crosses the link, how long the device waits for it, and programs that
are not as planned.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from plan_helpers import cpu_mesh
from test_hlo_text import ADD as ADDER, module

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._copied_bytes import CopiedBytes
from shardfn.analysis._hlo.host_copies import HostCopy, host_copy
from shardfn.analysis._hlo.parse import parse_module
from shardfn.analysis._hlo.play import play
from shardfn.analysis._hlo.timeline import Rates
from shardfn.analysis._host_check import check_host
from shardfn.analysis._html import page_data
from shardfn.analysis._latency import TransferTime
from shardfn.analysis.host_transfer import HostTransfer, LeafOnHost

HERE = "f32[4,8]{1,0}"
THERE = "f32[4,8]{1,0:S(5)}"
WHOLE = "f32[16,8]{1,0:S(5)}"
PARAMETERS = f"""
  %p = {THERE} parameter(0)
  %q = {HERE} parameter(1)
  %w = {WHOLE} parameter(2)
  %i = s32[] parameter(3)
"""


@pytest.mark.parametrize(
    "line, copied",
    [
        (f"%c = ({HERE}, {THERE}, u32[]) copy-start(%p)", HostCopy("device", 128)),
        (f"%c = ({THERE}, {HERE}, u32[]) copy-start(%q)", HostCopy("host", 128)),
        (f"%c = {HERE} copy(%p)", HostCopy("device", 128)),
        (f"%c = {HERE} dynamic-slice(%w, %i, %i)", HostCopy("device", 128)),
        (
            f"%c = (({WHOLE}, s32[], s32[]), {HERE}, u32[]) "
            "dynamic-slice-start(%w, %i, %i)",
            HostCopy("device", 128),
        ),
        (
            f"%c = (({WHOLE}, {HERE}, s32[], s32[]), {WHOLE}, u32[]) "
            "dynamic-update-slice-start(%w, %q, %i, %i)",
            HostCopy("host", 128),
        ),
        (f"%c = {THERE} copy(%p)", None),  # no link is crossed
        (f"%c = {HERE} add(%q, %q)", None),
        (f"%c = ({THERE}, {HERE}) tuple(%p, %q)", None),
    ],
)
def test_what_an_instruction_copies(line: str, copied: HostCopy | None) -> None:
    parsed = parse_module(module(PARAMETERS + line))
    assert host_copy(parsed.entry.instructions["c"], parsed.entry) == copied


RATES = Rates(
    matmul=lambda _: math.inf,
    memory=128.0,
    transfer=lambda _: TransferTime(0.0, 0.0),
    host=64,
)
"""A copy of 128 bytes takes two seconds; an addition of two such arrays three."""

COPY = f"%c = ({HERE}, {THERE}, u32[]) copy-start(%p)"
DONE = f"%d = {HERE} copy-done(%c)"
ADD = f"%a = {HERE} add(%q, %q)"
BACK = f"%b = {THERE} copy(%q)"


@pytest.mark.parametrize(
    "lines, exposed, seconds",
    [
        ([COPY, DONE, ADD], 2, 5),
        ([COPY, ADD, DONE], 0, 3),
        ([BACK, ADD], 2, 5),
        ([COPY, BACK, DONE], 2, 2),  # both directions at the same time
        ([COPY, f"%c2 = ({HERE}, {THERE}, u32[]) copy-start(%p)", DONE], 4, 4),
    ],
)
def test_the_device_waits_for_copies(lines, exposed, seconds) -> None:
    found = play(module(PARAMETERS + "\n".join(lines)), RATES)
    assert found.host_exposed == pytest.approx(exposed)
    assert found.seconds == pytest.approx(seconds)
    assert found.exposed == 0  # of collectives


LEAF = LeafOnHost("m", "float32", (4, 8))
LAYOUT = "HloModule m, entry_computation_layout={{({0})->({1})}}\n"


def program(taken: str, left: str, *lines: str) -> str:
    text = module(PARAMETERS + "\n".join(lines))
    return LAYOUT.format(taken, left) + text.partition("\n")[2]


@pytest.mark.parametrize(
    "text, wrong",
    [
        (program(THERE, THERE), ()),
        (
            program(HERE, THERE),
            ("m, float32 4x8 per device: arrives in the device's memory",),
        ),
        (
            program(THERE, HERE),
            ("m, float32 4x8 per device: leaves in the device's memory",),
        ),
        (
            program(f"{THERE}, {WHOLE}", THERE),
            ("an argument arrives on the host: float32 16x8",),
        ),
        (
            program(THERE, THERE, f"%x = {THERE} add(%p, %p)"),
            ("add x computes in the host's memory",),
        ),
        (
            program(
                THERE,
                THERE,
                f'%x = {THERE} custom-call(), custom_call_target="AllocateBuffer"',
            ),
            (),
        ),
        (
            program(THERE, THERE, f"%x = {THERE} copy(%p)"),
            ("copy x computes in the host's memory",),
        ),
    ],
)
def test_programs_that_are_not_as_planned(text, wrong) -> None:
    assert check_host([LEAF], (), False, text) == ((), wrong)


BIG = "f32[1024,1024]"
MOMENT = LeafOnHost("m", "float32", (1024, 1024))
SIZE = 4 * 2**20
IN = HostTransfer("device", "update", (8192, 1024), "float32", SIZE, 1, 0, "m")
OUT = replace(IN, memory="host")
WAITS = replace(IN, waits_for=frozenset({"shardfn.7.1.0"}))
COPY_IN = (
    f"%s = ({BIG}{{1,0}}, {BIG}{{1,0:S(5)}}, u32[]) copy-start(%m)",
    f"%d = {BIG}{{1,0}} copy-done(%s)",
)
COPY_OUT = f"%o = {BIG}{{1,0:S(5)}} copy(%d)"
GRADIENT = (
    f"%g = {BIG}{{1,0}} reduce-scatter(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, "
    'dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/shardfn.7.1.0/reduce"}'
)
BEHIND = (
    f"%t = ({BIG}{{1,0:S(5)}}, {BIG}{{1,0}}) tuple(%m, %g)",
    f"%b = ({BIG}{{1,0:S(5)}}, {BIG}{{1,0}}) opt-barrier(%t)",
    f"%e = {BIG}{{1,0:S(5)}} get-tuple-element(%b), index=0",
    COPY_IN[0].replace("%m", "%e"),
    COPY_IN[1],
)


def program_of_moment(*lines: str) -> str:
    given = f"""
  %m = {BIG}{{1,0:S(5)}} parameter(0)
  %x = f32[8192,1024]{{1,0}} parameter(1)
"""
    there = f"{BIG}{{1,0:S(5)}}"
    text = module(given + "\n".join(lines), ADDER)
    return LAYOUT.format(there, there) + text.partition("\n")[2]


EARLY = "m: 4.0 MiB come from the host before the gradient that they wait for"
MORE = "each device copies 8.0 MiB to its host per step; planned 4.0 MiB"


@pytest.mark.parametrize(
    "lines, transfer, itself, wrong",
    [
        ((GRADIENT, *COPY_IN, COPY_OUT), WAITS, False, ()),
        ((GRADIENT, *BEHIND, COPY_OUT), WAITS, False, ()),
        ((*COPY_IN, GRADIENT, COPY_OUT), WAITS, False, (EARLY,)),
        ((*COPY_IN, GRADIENT, COPY_OUT), IN, False, ()),  # waits for nothing
        ((GRADIENT, *COPY_IN, COPY_OUT, COPY_OUT), WAITS, False, (MORE,)),
        ((GRADIENT, *COPY_IN, COPY_OUT, COPY_OUT), WAITS, True, ()),
        ((GRADIENT, *COPY_IN), WAITS, False, ()),  # less than planned
    ],
)
def test_programs_copy_no_more_than_planned_and_no_earlier(
    lines: tuple[str, ...], transfer: HostTransfer, itself: bool, wrong: tuple[str, ...]
) -> None:
    named = [line.replace("%o ", f"%o{k} ") for k, line in enumerate(lines)]
    text = program_of_moment(*named)
    copied, found = check_host([MOMENT], [transfer, OUT], itself, text)
    assert found == wrong
    outs = sum(line is COPY_OUT for line in lines)
    assert copied == (
        CopiedBytes("device", SIZE, SIZE),
        CopiedBytes("host", SIZE, outs * SIZE),
    )


def train(state: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
    m = 0.5 * state["m"] + grads
    return {"w": state["w"] - m, "m": m}


def train_layers(state: Any, x: jax.Array) -> Any:
    def loss(layers: jax.Array) -> jax.Array:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)
        return jnp.mean(h**2)

    m = 0.5 * state["m"] + jax.grad(loss)(state["w"])
    return {"w": state["w"] - m, "m": m}


STATE = {k: jax.ShapeDtypeStruct((256, 512), jnp.float32) for k in ("w", "m")}
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def test_plans_and_programs_of_the_other_memory_do_not_fit() -> None:
    mesh = cpu_mesh(8)
    step = shardfn.fully_shard(train, mesh, offload={"m": "host"})
    plain = shardfn.fully_shard(train, mesh)
    plan, text = step.plan(STATE, X), step.lower(STATE, X).compile().as_text()
    assert text is not None
    checked = plan.verify(text)
    assert checked.ok and not checked.on_host
    other = plain.lower(STATE, X).compile().as_text()
    assert other is not None
    checked = plan.verify(other)
    assert not checked.ok
    assert checked.on_host == (
        "m, float32 32x512 per device: arrives in the device's memory",
        "m, float32 32x512 per device: leaves in the device's memory",
    )
    assert checked.on_host[0] in str(checked) and checked.on_host[0] in (
        checked.problems()
    )
    assert not plain.plan(STATE, X).verify(text).ok


@pytest.mark.parametrize("target", [aot("h100:8"), aot("tpu:v5e:2x4", exhaustive=True)])
def test_device_memory_falls_on_machines_that_are_not_there(target) -> None:
    """GPUs that are only described say nothing of their memories: what was on the host
    was on the device there, without a word."""
    mesh = cpu_mesh(8)
    layers = jax.ShapeDtypeStruct((64, 2048, 2048), jnp.float32)
    state, moments = {"w": layers, "m": layers}, 64 * 2048 * 2048 * 4 // 8
    x = jax.ShapeDtypeStruct((64, 2048), jnp.float32)
    options: list[Any] = [None, {"m": "host"}]
    plain, report = (
        shardfn.fully_shard(train_layers, mesh, offload=offload).on(target, state, x)
        for offload in options
    )
    assert report.verification.ok
    each = [(c.planned, c.found) for c in report.verification.copied]
    assert each == [(moments, moments)] * 2
    assert report.host_bytes == report.memory.host_arguments == moments
    assert report.memory.host_temporary == 0
    fallen = plain.memory.peak - report.memory.peak
    assert fallen > 0.9 * moments, (plain.memory, report.memory)
    each_way = moments / targets.target(target).host_bandwidth
    assert 0.9 * each_way < report.host_exposed_seconds < 2.6 * each_way
    drawn = page_data(report)["device"]
    waits = sum(end - start for start, end, kind, *_ in drawn if kind == "wait")
    exposed = report.exposed_seconds + report.host_exposed_seconds
    assert waits == pytest.approx(exposed, rel=1e-3)
    text = str(report)
    assert "state in the host's memory 128.0 MiB" in text
    assert "128.0 MiB in and 128.0 MiB out at" in text
    assert "bound by the host's link: " in text and "% of" in text
    sent = {kind: 0 for kind in ("to_device", "to_host")}
    for *_, kind, _, size in page_data(report)["copies"]:
        sent[kind] += size
    assert sent == {"to_device": moments, "to_host": moments}


def train_read_twice(state, x):
    """SGD with a norm of the gradient in front of the update: the parameter is copied
    to the device for the forward pass, and a second time behind its gradient."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state)
    grad *= jax.lax.rsqrt(jnp.sum(grad**2) + 1e-6)
    return state - 0.1 * (grad + 0.01 * state), loss


@pytest.mark.parametrize("target", [aot("h100:8"), aot("tpu:v5e:2x4")])
def test_a_parameter_that_is_read_twice_is_computed_with_on_the_device(target) -> None:
    """libtpu left out the second copy, and made the update in the host's memory."""
    step = shardfn.fully_shard(train_read_twice, cpu_mesh(8), offload={"*": "host"})
    w = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    report = step.on(target, w, jax.ShapeDtypeStruct((64, 1024), jnp.float32))
    assert report.verification.ok, report.verification.problems()
    assert len(report.plan.transfers) == 3


@pytest.mark.parametrize("trains", [False, True])
def test_leaves_that_are_only_read_do_not_leave_for_the_host(trains: bool) -> None:
    """Of a step that returns no state, and of frozen weights beside one that comes
    back."""
    devices, width = 8, 64

    def read(frozen: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ frozen["w"]) ** 2)

    def train(state: Any, frozen: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda s: read({"w": frozen["w"] * s["gain"]}, x))(state)
        return jax.tree.map(lambda s, g: s - g, state, grads), read(frozen, x)

    frozen, x = {"w": jnp.ones((width, width))}, jnp.ones((devices, width))
    asked: dict[str, Any] = {"min_size": 8, "offload": {"*": "host"}, "verify": "error"}
    if not trains:
        step = shardfn.fully_shard(read, cpu_mesh(devices), **asked)
        assert float(step(step.shard(frozen), x)) == width**2
        return
    asked["state_argnums"] = (0, 1)
    both = shardfn.fully_shard(train, cpu_mesh(devices), **asked)
    state = both.shard({"gain": jnp.ones((width, width))})
    new, loss = both(state, both.shard(frozen), x)
    assert new["gain"].sharding.memory_kind == "pinned_host"
    assert float(loss) == width**2
