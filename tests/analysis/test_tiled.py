"""In: a compiled program, edited as libtpu would make it, or worse. Out: which sums are
taken for planned ones in parts of whole tiles, with rows that are sent on."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.analysis._match import verify

MESH = jax.make_mesh((4, 2), ("data", "model"))
OPTIONS = {
    "axis": ("data", "model"),
    "shard": {"w": {"data": 0}, "b": {"data": 0}},
    "min_size": 0,
}
ARGS = {"w": jnp.ones((64, 352)), "b": jnp.ones(352)}, jnp.ones((16, 64))


def train(state: Any, x: jax.Array) -> Any:
    def loss(state: Any) -> jax.Array:
        return jnp.square(jnp.tanh(x @ state["w"]) + state["b"]).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.5 * g, state, grads), value


@pytest.fixture(scope="module")
def program() -> tuple[Any, str]:
    """The plan's lines, and the text of the compiled program."""
    step = shardfn.fully_shard(train, MESH, **OPTIONS)
    text = step.lower(*ARGS).compile().as_text() or ""
    return step.plan(*ARGS).collectives, text


def checked(program: tuple[Any, str], platform: str, *edits: tuple[str, str]) -> Any:
    lines, text = program
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    axes = shardfn.fully_shard(train, MESH, **OPTIONS).storage.axes
    return verify(lines, axes, text, platform)


def sum_of(program: tuple[Any, str], shape: str) -> str:
    """The line of the reduce-scatter that leaves this on a device."""
    (line,) = re.findall(rf".*{re.escape(shape)}.* reduce-scatter\(.*\n", program[1])
    return line


ROWS, VECTOR = "f32[352,16]", "f32[88]"
DATA = "{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
MODEL = "{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"


def sent_on(shape: str, pairs: str = DATA, times: int = 1) -> str:
    return "".join(
        f"  %sent.{i} = {shape} collective-permute(%given), channel_id=7{i}, "
        f"source_target_pairs={pairs}\n"
        for i in range(times)
    )


def padded(program: tuple[Any, str], shape: str, behind: str = "") -> tuple[str, str]:
    line = sum_of(program, ROWS)
    return line, line.replace(ROWS, shape, 1) + behind


@pytest.mark.parametrize(
    "behind", ["", sent_on("f32[4,352]"), sent_on("f32[20,352]", times=4)]
)
def test_a_sum_of_larger_parts_is_tiled_on_tpus(program, behind: str) -> None:
    edit = padded(program, "f32[352,20]", behind)
    found = checked(program, "tpu", edit)
    assert [c.line.path for c in found.having("tiled")] == ["w"]
    assert found.ok
    elsewhere = checked(program, "cpu", edit)
    assert not elsewhere.having("tiled") and not elsewhere.ok


@pytest.mark.parametrize(
    "shape, behind",
    [
        ("f64[352,20]", ""),
        ("f32[352,24]", ""),  # a tile more
        ("f32[352,12]", ""),
        ("f32[350,20]", ""),
        ("f32[352,20]", sent_on("f32[24,352]")),
        ("f32[352,20]", sent_on("f32[351]")),
        ("f32[352,20]", sent_on("bf16[4,352]")),
        ("f32[352,20]", sent_on("f32[4,352]", MODEL)),
        ("f32[352,20]", sent_on("f32[20,352]", times=5)),
    ],
)
def test_another_sum_or_more_that_is_sent_is_not(program, shape, behind) -> None:
    assert checked(program, "tpu").ok
    assert not checked(program, "tpu", padded(program, shape, behind)).ok


def test_it_is_between_the_devices_of_the_line(program) -> None:
    old, new = padded(program, "f32[352,20]")
    over_data = re.search(r"replica_groups=\S+", new)
    assert over_data is not None
    new = new.replace(over_data[0], "replica_groups={{0,1,2,3},{4,5,6,7}},")
    assert not checked(program, "tpu", (old, new)).ok


def test_vectors_have_no_rows(program) -> None:
    line = sum_of(program, VECTOR)
    edit = line, line.replace(VECTOR, "f32[94]", 1)
    assert not checked(program, "tpu", edit).ok


def test_what_little_is_all_reduced_is_a_fault_but_on_tpus(program) -> None:
    """There the compiler chooses so; elsewhere the plan may be wrong."""
    found = checked(program, "tpu")
    line = next(c for c in found.lines if c.line.path == "b")
    reduced = dataclasses.replace(line, status="all-reduced")
    lines = tuple(reduced if c is line else c for c in found.lines)
    found = dataclasses.replace(found, lines=lines)
    large = dataclasses.replace(line.line, wire_bytes=10**9)
    much = dataclasses.replace(found.lines[0], line=large)
    found = dataclasses.replace(found, lines=(*lines, much))
    assert found.ok
    assert not dataclasses.replace(found, platform="gpu").ok
