"""In: small steps, every reduction and dtype among them, compiled for CPU devices. Out:
`Plan.verify` refuses none of them, and refuses each once its program is spoiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from numpy.testing import assert_allclose
from plan_helpers import CPU_MERGES_GATHERS, QUICK, cpu_mesh

import shardfn
from shardfn._core.sharding import Axes
from shardfn.analysis._match import verify
from shardfn.analysis.collective import Collective

DTYPES = "bool int8 uint32 float16 float32".split()

REDUCTIONS = {
    "sum": lambda x: jnp.sum(x, dtype=x.dtype),
    "mean": jnp.mean,
    "prod": lambda x: jnp.prod(x, dtype=x.dtype),
    "max": jnp.max,
    "min": jnp.min,
    "any": jnp.any,
    "all": jnp.all,
    "xor": lambda x: lax.reduce_xor(x, (0,)),
    "argmax": jnp.argmax,
    "norm": jnp.linalg.norm,
    "median": jnp.median,
    "top_k": lambda x: lax.top_k(x[:, 0], 3)[0],
    "cumsum": lambda x: jnp.cumsum(x, 0),
}


def reduces(x: jax.Array) -> dict[str, jax.Array]:
    """Every reduction that the dtype of `x` has."""
    out = {}
    for name, reduction in REDUCTIONS.items():
        try:
            out[name] = reduction(x)
        except (TypeError, ValueError):
            assert name not in ("sum", "mean", "prod", "any", "all")
    return out


def checked(step: Any, state: Any, *batch: Any, **options: Any) -> shardfn.Verification:
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, **options)
    compiled = sharded.lower(state, *batch).compile(compiler_options=QUICK)
    return sharded.plan(state, *batch).verify(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_planned_as_they_are_emitted(dtype: str) -> None:
    result = checked(
        lambda w, x: (w, reduces(x)), jnp.ones(8), jnp.ones((16, 3), dtype)
    )
    assert result.ok, result.problems()
    assert {c.line.op for c in result.lines} >= {"all_reduce", "all_gather"}


def test_a_product_over_devices_is_an_all_gather_of_its_terms() -> None:
    result = checked(
        lambda w, x: (w, jnp.prod(x, axis=0)), jnp.ones(8), jnp.ones((16, 3))
    )
    (line,) = result.lines
    assert (line.line.op, line.line.elements, line.line.reduces) == (
        "all_gather",
        24,
        "",
    )
    assert line.wire_bytes == line.line.wire_bytes == 7 * 3 * 4


def trained(loss: Any) -> Any:
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def tied(remat: bool) -> Any:
    """A table that is the head too, around a scan of layers that share a bias."""

    def loss(p, tokens):
        def layer(h, w):
            return h + jnp.tanh(h @ w["up"] + p["bias"]) @ w["down"], None

        layer = jax.checkpoint(layer) if remat else layer
        h, _ = lax.scan(layer, p["table"][tokens], p["layers"])
        return -jnp.mean(jax.nn.log_softmax(h @ p["table"].T)[..., 0])

    return trained(loss)


TIED = {
    "layers": {"up": jnp.ones((3, 8, 16)), "down": jnp.ones((3, 16, 8))},
    "table": jnp.ones((32, 8)),
    "bias": jnp.ones(16),
}
TOKENS = jnp.zeros((16, 4), jnp.int32)
SQUARES = [jnp.ones((8, 8))] * 3
ROWS = jnp.ones((16, 8))


def layered(p, x):
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def halved(p, x):
    hidden = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p[0]) @ p[1]))(p, x)
    return jnp.mean((hidden @ p[2]) ** 2)


def looped(p, x):
    x, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)
    return jnp.mean(x**2)


def branched(p, x):
    ways = lambda w: jnp.mean(x @ w), lambda w: jnp.max(w) * 2, lambda w: jnp.prod(x)
    return lax.switch(jnp.int32(x.sum()) % 3, ways, p)


def multiplied(w, x):
    return w, lax.scan(lambda c, y: (c * jnp.prod(y), None), 1.0, x.T)[0]


PROGRAMS = {
    "tied_remat_ahead": (tied(True), TIED, TOKENS, {"prefetch": 1}),
    "tied_again": (tied(False), TIED, TOKENS, {"reshard_after_forward": True}),
    "again": (trained(layered), SQUARES, ROWS, {"reshard_after_forward": True}),
    "remat": (trained(halved), SQUARES, ROWS, {}),
    "no_iterations": (trained(looped), jnp.ones((0, 8, 8)), ROWS, {}),
    "products_in_a_loop": (multiplied, jnp.ones(8), ROWS, {}),
    "branches": (trained(branched), jnp.ones((8, 8)), ROWS, {}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_sound_program_is_refused(name: str) -> None:
    *arguments, options = PROGRAMS[name]
    result = checked(*arguments, **options)
    assert result.ok, result.problems()
    assert CPU_MERGES_GATHERS or not result.having("shared")


def unrolled(unroll: int, remat: bool, penalty: bool) -> Any:
    """A step whose loop over 3 layers is written out in part, perhaps with remat, and
    with a penalty on the gradient of the rows."""

    def layer(h, w):
        return jnp.tanh(h @ w), None

    def rows_of(p, x):
        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(lax.scan(body, x, p, unroll=unroll)[0] ** 2)

    def loss(p, x):
        slope = jax.grad(rows_of, 1)(p, x) if penalty else x
        return rows_of(p, x) / 16 + jnp.mean(slope**2)

    return trained(loss)


@pytest.mark.covering(2)
@pytest.mark.parametrize("unroll", [1, 2, 3])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("penalty", [False, True])
def test_loops_that_are_written_out_are_not_refused(unroll, remat, penalty) -> None:
    """Nothing reads the gradient of the first layer's rows: compilers drop its gather.
    Two passes that compute the same gather once; those of JAX 0.10 share still more."""
    step, x = (
        unrolled(unroll, remat, penalty),
        jnp.cos(jnp.arange(128.0)).reshape(16, 8),
    )
    p = jnp.sin(jnp.arange(192.0)).reshape(3, 8, 8)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, verify="error")
    expected = step(p, x)
    got = sharded(sharded.shard(p), x)
    assert_allclose(sharded.unshard(got[0]), expected[0], rtol=1e-5, atol=1e-6)
    assert_allclose(got[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize(
    "length, unroll, times", [(4, 1, 4), (4, 2, 4), (4, 3, 3), (4, 4, 3), (5, 2, 4)]
)
def test_gathers_of_iterations_that_nothing_reads_are_not_planned(
    length: int, unroll: int, times: int
) -> None:
    step = unrolled(unroll, remat=False, penalty=False)
    sharded = shardfn.fully_shard(step, cpu_mesh(8), min_size=0)
    lines = sharded.plan(jnp.ones((length, 8, 8)), ROWS).collectives
    gathers = {c.phase: c.times for c in lines if c.op == "all_gather"}
    assert gathers == {"forward": length, "backward": times}


def test_what_iterations_share_is_not_gathered_ahead() -> None:
    sharded = shardfn.fully_shard(tied(True), cpu_mesh(8), min_size=0, prefetch=1)
    times = {(c.path, c.times) for c in sharded.plan(TIED, TOKENS).collectives}
    assert {("layers/up", 4), ("layers/down", 4), ("bias", 3)} <= times
    assert ("bias", 4) not in times


# What a compiler joins

AXES = Axes(("data",), (8,), (("data", 8),))
REDUCER = """
%{0} (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] {0}(%a, %b)
}}
"""


def sums(*elements: int, reducer: str = "add", names: dict[int, str] | None = None):
    """A program that all-reduces arrays of these many elements."""
    lines = [
        f"  %r{i} = f32[{n}] all-reduce(%p), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, "
        f'to_apply=%{reducer}, metadata={{op_name="{(names or {}).get(i, "")}"}}'
        for i, n in enumerate(elements)
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
