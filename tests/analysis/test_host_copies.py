"""In: compiled programs, and HLO texts written out by hand, with arrays in the host's
memory. Out: what crosses the link, how long the device waits for it, and programs that
are not as planned.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from plan_helpers import cpu_mesh
from test_hlo_text import module

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo.host_copies import HostCopy, host_copy
from shardfn.analysis._hlo.parse import parse_module
from shardfn.analysis._hlo.play import play
from shardfn.analysis._hlo.timeline import Rates
from shardfn.analysis._host_check import check_host
from shardfn.analysis._html import page_data
from shardfn.analysis._latency import TransferTime
from shardfn.analysis.host_transfer import LeafOnHost

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
    assert check_host([LEAF], text) == wrong


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
