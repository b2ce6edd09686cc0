"""In: lines of a plan, and programs written by hand in which compilers joined them.
Out: `verify` finds each line in what it became, and refuses what is another program.
"""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh

import shardfn
from shardfn._core.sharding import Axes
from shardfn.analysis._match import verify
from shardfn.analysis.collective import Collective

AXES = Axes(("data",), (8,), (("data", 8),))
ALL = "{{0,1,2,3,4,5,6,7}}"
REDUCER = """
%{0} (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] {0}(%a, %b)
}}
"""


def sums(*elements: Any, reducer: str = "add", names: dict[int, str] | None = None):
    """A program that all-reduces arrays of these many elements, over all devices or
    given groups."""
    each = [n if isinstance(n, tuple) else (n, ALL) for n in elements]
    lines = [
        f"  %r{i} = f32[{n}] all-reduce(%p), replica_groups={groups}, "
        f'to_apply=%{reducer}, metadata={{op_name="{(names or {}).get(i, "")}"}}'
        for i, (n, groups) in enumerate(each)
    ]
    head = "HloModule jit_f, is_scheduled=true, num_partitions=8\n"
    entry = [
        "ENTRY %main (p: f32[8]) -> f32[] {",
        *lines,
        "  ROOT %z = f32[] constant(0)",
    ]
    return "\n".join([head, REDUCER.format(reducer), *entry, "}", ""])


def planned(*elements: int, reduces: str = "sum") -> list[Collective]:
    """Lines that all-reduce arrays of these many elements."""
    return [
        Collective(
            *("all_reduce", "data", "backward", (n,), "float32", 7 * n, 1),
            name=f"shardfn.{i}.1.0",
            elements=n,
            devices=8,
            reduces=reduces,
        )
        for i, n in enumerate(elements)
    ]


JOINED = [
    ("one of many", [2**i for i in range(20)], [2**20 - 1]),
    ("more subsets than can be listed", range(1, 400), [sum(range(1, 400))]),
    ("a first fit that leaves none", [6, 5, 5, 4, 3, 1], [9, 8, 7]),
    ("more than a table holds", [2**20 + i for i in range(999)], [2**29, 511155013]),
]


@pytest.mark.parametrize(
    "lines, found", [j[1:] for j in JOINED], ids=[j[0] for j in JOINED]
)
def test_sums_that_a_compiler_joins_are_found(lines: Any, found: Any) -> None:
    assert sum(lines) == sum(found)
    result = verify(planned(*lines), AXES, sums(*found))
    assert result.ok, result.problems()


def test_a_sum_that_is_in_no_other_is_missing() -> None:
    result = verify(planned(512, 30, 7), AXES, sums(519))
    assert [c.status for c in result.lines] == ["present", "missing", "present"]
    assert not result.extra


def test_a_name_tells_which_of_equal_sums_is_there() -> None:
    text = sums(35, names={0: "jit(f)/shardfn.2.1.0/psum"})
    result = verify(planned(10, 25, 20, 15), AXES, text)
    assert [c.status for c in result.lines] == [
        "missing",
        "missing",
        "present",
        "present",
    ]


@pytest.mark.parametrize(
    "found, statuses, alike",
    [
        ((1, 1), "present once present", True),
        ((2,), "present once present", True),
        ((1,), "present once missing", True),
        ((), "missing missing missing", True),
        ((1, 1), "present present missing", False),
    ],
)
def test_of_sums_that_compute_the_same_one_has_to_be_there(
    found: Any, statuses: str, alike: bool
) -> None:
    """The first two of three lines; nothing in the program says which are there."""
    why = (SimpleNamespace(move="a sum"),)
    lines = [
        replace(line, value=(i,), alike=(max(i, 1) if alike else i,), why=why)
        for i, line in enumerate(planned(1, 1, 1))
    ]
    result = verify(lines, AXES, sums(*found))
    assert " ".join(c.status for c in result.lines) == statuses


def test_what_cannot_be_told_is_said_to_be_so() -> None:
    result = verify(planned(6, 6, 6), AXES, sums(7, 9))
    assert {c.status for c in result.lines} == {"undecided"} and not result.ok
    assert "which of them is missing cannot be told" in result.problems()


@pytest.mark.parametrize(
    "planned_as, emitted",
    [("sum", "maximum"), ("max", "add"), ("min", "maximum"), ("max", "minimum")],
)
def test_another_reduction_is_told(planned_as: str, emitted: str) -> None:
    lines = planned(6, 9, reduces=planned_as)
    named = sums(6, 9, reducer=emitted, names={i: c.name for i, c in enumerate(lines)})
    for text in (named, sums(6, 9, reducer=emitted), sums(15, reducer=emitted)):
        assert not verify(lines, AXES, text).ok


# All-reduces over two axes

HYBRID = Axes(("replica", "data"), (2, 4), (("replica", 2), ("data", 4)))
DATA = "{{0,1,2,3},{4,5,6,7}}"
REPLICA = "[4,2]<=[2,4]T(1,0)"
WRONG = "{{0,1},{2,3},{4,5},{6,7}}"
FOURS = "{{0,2,4,6},{1,3,5,7}}"


def hybrid(*lines: tuple[int, str, int]) -> list[Collective]:
    """Lines of so many elements over an axis of a value."""
    return [
        replace(
            *planned(n),
            axis=axis,
            devices=dict(HYBRID.mesh)[axis],
            value=(value,),
            name=f"shardfn.{i}.1.0",
        )
        for i, (n, axis, value) in enumerate(lines)
    ]


LOSS = [(1, "replica", 0), (1, "data", 0)]
GRADIENTS = [(48, "replica", 1), (60, "replica", 2)]
THREE = (("dcn", 2), ("replica", 2), ("data", 2))


@pytest.mark.parametrize(
    "lines, found",
    [
        (LOSS, [(1, REPLICA), (1, DATA)]),
        (LOSS, [(1, ALL)]),
        ([*LOSS, *GRADIENTS], [(1, ALL), (108, REPLICA)]),
        ([*LOSS, *GRADIENTS], [(1, ALL), (50, REPLICA), (58, REPLICA)]),
        ([*LOSS, *GRADIENTS], [(109, REPLICA), (1, DATA)]),
        ([(7, "replica", 5), (7, "data", 5), *LOSS], [(8, ALL)]),
        # What is joined is as large as what is folded.
        (
            [(108, "replica", 5), (108, "data", 5), *GRADIENTS],
            [(108, REPLICA), (108, ALL)],
        ),
    ],
)
def test_all_reduces_over_two_axes_may_be_one_over_both(lines, found) -> None:
    result = verify(hybrid(*lines), HYBRID, sums(*found))
    assert result.ok, str(result)
    folded = result.having("folded")
    assert {c.line.axis for c in folded} in (set(), {"replica", "data"})
    sent = sum(n * (2 * k - 2) // k for n, k in ((4 * n, _count(g)) for n, g in found))
    assert result.wire_bytes == sent


def _count(groups: str) -> int:
    return {ALL: 8, DATA: 4, REPLICA: 2}[groups]


@pytest.mark.parametrize(
    "lines, found",
    [
        (LOSS, []),
        (LOSS, [(1, REPLICA)]),
        (LOSS, [(1, DATA)]),
        (LOSS, [(2, ALL)]),
        (LOSS, [(1, WRONG), (1, DATA)]),
        (LOSS, [(1, REPLICA), (1, FOURS)]),
        (LOSS, [(1, ALL), (1, ALL)]),
        ([*LOSS, *GRADIENTS], [(1, ALL), (107, REPLICA)]),
        ([*LOSS, *GRADIENTS], [(1, ALL), (108, WRONG)]),
        ([*LOSS, *GRADIENTS], [(1, ALL), (108, ALL)]),
        ([*LOSS, *GRADIENTS], [(108, REPLICA)]),
        ([(1, "replica", 0), (1, "data", 9)], [(1, ALL)]),
        ([(1, "replica", 0)], [(1, ALL)]),
        ([(1, "data", 0)], [(1, ALL)]),
        ([(6, "data", 0), (7, "data", 1)], [(13, FOURS)]),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_others_may_not(lines, found, named) -> None:
    """A sum that is missing, over other devices, of another size or of another value
    is refused, whatever name it carries."""
    lines_ = hybrid(*lines)
    names = {i: f"jit(f)/{c.name}/psum" for i, c in enumerate(lines_) if named}
    assert not verify(lines_, HYBRID, sums(*found, names=names)).ok


@pytest.mark.parametrize("found", [[ALL], [DATA, REPLICA]])
def test_of_three_axes_all_or_two_neighbours_may_be_one(found) -> None:
    axes = Axes(("dcn", "replica", "data"), (2, 2, 2), THREE)
    lines = [
        replace(*planned(5), axis=name, devices=2, value=(0,), name=f"shardfn.{i}.1.0")
        for i, (name, _) in enumerate(THREE)
    ]
    assert verify(lines, axes, sums(*((5, groups) for groups in found))).ok
    assert not verify(lines, axes, sums(*((5, groups) for groups in found[1:]))).ok


# What CPUs merge

ROWS = (jnp.ones((8, 8)), jnp.ones((16, 8)))


def rolled(w: jax.Array, x: jax.Array, there: int = 2) -> tuple[jax.Array, jax.Array]:
    """Rolls rows in and out of `jax.checkpoint`."""

    def loss(w):
        inner = jax.checkpoint(lambda w: jnp.sin(jnp.roll(x, there, 0) @ w))
        return jnp.mean(jnp.tanh(jnp.roll(x, 2, 0) @ w) ** 2) + jnp.mean(inner(w))

    value, gradient = jax.value_and_grad(loss)(w)
    return w - gradient, value


def test_equal_moves_in_and_out_of_checkpoint_may_be_one() -> None:
    sharded = shardfn.fully_shard(rolled, cpu_mesh(8), min_size=0)
    plan = sharded.plan(*ROWS)
    text = sharded.lower(*ROWS).compile().as_text()
    assert [c.op for c in plan.collectives].count("ppermute") == 2
    checked = verify(plan.collectives, plan.axes, text, "cpu")
    assert checked.ok, checked.problems()
    gone = re.sub(r" collective-permute(-start)?\(", " custom-call(", text)
    wrong = verify(plan.collectives, plan.axes, gone, "cpu")
    assert len(wrong.having("missing")) == 2


def test_moves_by_different_numbers_of_blocks_may_not() -> None:
    sharded = shardfn.fully_shard(lambda w, x: rolled(w, x, 6), cpu_mesh(8), min_size=0)
    plan = sharded.plan(*ROWS)
    moves = [c for c in plan.collectives if c.op == "ppermute"]
    assert len({(c.value, c.elements, c.axis) for c in moves}) < len(moves)
    text = sharded.lower(*ROWS).compile().as_text()
    assert verify(plan.collectives, plan.axes, text, "cpu").ok
    gone = re.sub(r" collective-permute(-start)?\(", " custom-call(", text, count=1)
    assert verify(plan.collectives, plan.axes, gone, "cpu").having("missing")


# What GPUs join


@pytest.mark.aot("h100:2x1x4")
def test_sums_over_two_axes_that_gpus_fold_and_join_are_found() -> None:
    def step(w, x):
        def loss(w):
            def layer(h, w):
                return h + jnp.tanh(h @ w["up"]) @ w["down"] * w["scale"], None

            h, _ = jax.lax.scan(jax.checkpoint(layer), x, w)
            return jnp.mean(h**2)

        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(jnp.subtract, w, gradient), value

    aval = jax.ShapeDtypeStruct
    w = {
        "up": aval((3, 64, 192), jnp.float32),
        "down": aval((3, 192, 64), jnp.float32),
        "scale": aval((3, 64), jnp.float32),
    }
    mesh = jax.make_mesh((2, 4), ("replica", "data"))
    sharded = shardfn.fully_shard(step, mesh, axis=("replica", "data"), min_size=64)
    report = sharded.on(
        "h100:2x1x4", w, aval((4096, 64), jnp.float32), mesh_shape=(2, 4)
    )
    assert report.verification.ok, report.verification.problems()
    assert len(report.verification.having("folded")) == 2
