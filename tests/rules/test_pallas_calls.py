"""Pallas kernels, in interpret mode: what their grids let be split, every split against
the whole, and training steps that call them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from harness import equation_of
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from table import Row, table

import shardfn
from shardfn._core.rule_registry import rule_of
from shardfn.analysis import targets
from shardfn.testing import assert_parity

MESH = jax.make_mesh((8,), ("data",))

Index = Callable[..., tuple[Any, ...]]
Block = tuple[tuple[int | None, ...], Index]


def called(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    blocks: Sequence[Block],
    out: tuple[tuple[int, ...], Block],
    **options: Any,
) -> Callable[..., jax.Array]:
    """A kernel on these blocks of its operands, to blocks of one result."""

    def call(*operands: jax.Array) -> jax.Array:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(out[0], jnp.float32),
            grid=grid,
            in_specs=[pl.BlockSpec(*block) for block in blocks],
            out_specs=pl.BlockSpec(*out[1]),
            interpret=True,
            **options,
        )(*operands)

    return call


def copy(x_ref: Any, *rest: Any) -> None:
    rest[-1][...] = jnp.square(x_ref[...])


def scaled(x_ref: Any, scale_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * scale_ref[...]


def summed(x_ref: Any, out_ref: Any) -> None:
    """Adds up blocks of columns, in the block of the result."""

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

    out_ref[...] += x_ref[...].sum(1, keepdims=True)


def numbered(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + pl.program_id(0).astype(jnp.float32)


def counted(x_ref: Any, out_ref: Any, count_ref: Any) -> None:
    """Counts rows in scratch memory, from one program to the next."""
    count_ref[...] += x_ref[...]
    out_ref[...] = count_ref[...]


def counted_anew(x_ref: Any, out_ref: Any, count_ref: Any) -> None:
    count_ref[...] = 2 * x_ref[...]
    out_ref[...] = count_ref[...]


def at(*which: int | None) -> Index:
    """Blocks numbered by these dimensions of the grid, or by none."""
    return lambda *ids: tuple(0 if d is None else ids[d] for d in which)


ROWS: Block = ((2, 6), at(0, None))
CELLS: Block = ((2, 3), at(0, 1))
X = (8, 6)


def row(
    expected: str,
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    blocks: Sequence[Block],
    out: Block,
    shapes: Sequence[tuple[int, ...]] = (X,),
    result: tuple[int, ...] = X,
    needless: tuple[str, ...] = (),
    uncounted: tuple[int, ...] = (),
    **options: Any,
) -> Row:
    call = called(kernel, grid, blocks, (result, out), **options)
    return Row(
        call,
        tuple(shapes),
        expected,
        needless=needless,
        uncounted=uncounted,
    )


@table(
    row("(p0 a) b -> (p0 c) d  whole={a, b, c, d}", copy, (4,), [ROWS], ROWS),
    row(
        "(p0 a) (p1 b) -> (p0 c) (p1 d)  whole={a, b, c, d}",
        copy,
        (4, 2),
        [CELLS],
        CELLS,
    ),
    row(
        "(p0 a) b, c d -> (p0 e) f  whole={a, b, c, d, e, f}",
        scaled,
        (4,),
        [ROWS, ((1, 6), at(None, None))],
        ROWS,
        shapes=[X, (1, 6)],
        uncounted=(0, 1),
    ),
    row(
        "(p0 a) b -> (p0 c) d  whole={a, b, c, d}",
        summed,
        (4, 2),
        [CELLS],
        ((2, 1), at(0, None)),
        result=(8, 1),
        uncounted=(0,),
    ),
    row(
        "(p0 a) b -> (p0 c) d  whole={a, b, c, d}",
        counted_anew,
        (4,),
        [ROWS],
        ROWS,
        scratch_shapes=[pltpu.VMEM((2, 6), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        uncounted=(0,),
    ),
    row(
        "(p0 a) b -> (p0 c) d  whole={a, b, c, d}",
        copy,
        (4,),
        [ROWS],
        ROWS,
        input_output_aliases={0: 0},
    ),
    row(
        "(p0 a) (p1 b) c -> (p0 d) (p1 e) f  whole={a, b, c, d, e, f}",
        copy,
        (4, 2),
        [((1, None, 3), at(0, 1, None))],
        ((1, None, 3), at(0, 1, None)),
        shapes=[(4, 2, 3)],
        result=(4, 2, 3),
    ),
)
def test_what_a_grid_lets_be_split(row: Row) -> None:
    row.check()


def turned(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...].T


def drawn(x_ref: Any, out_ref: Any) -> None:
    """Random numbers that go on from the program before."""
    bits = pltpu.prng_random_bits((2, 6))
    out_ref[...] = x_ref[...] + bits.astype(jnp.float32)


REFUSED: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...]]] = {
    "asks for its number": (called(numbered, (4,), [ROWS], (X, ROWS)), X),
    "counts in scratch memory": (
        called(
            counted,
            (4,),
            [ROWS],
            (X, ROWS),
            scratch_shapes=[pltpu.VMEM((2, 6), jnp.float32)],
        ),
        X,
    ),
    "draws on": (called(drawn, (4,), [ROWS], (X, ROWS)), X),
    "changed in another place": (
        called(
            turned,
            (2,),
            [((2, 4), at(0, None))],
            ((4, 4), ((4, 2), at(None, 0))),
            input_output_aliases={0: 0},
        ),
        (4, 4),
    ),
    "blocks from behind": (
        called(copy, (4,), [((2, 6), lambda i: (3 - i, 0))], (X, ROWS)),
        X,
    ),
    "all write to one block": (
        called(copy, (4,), [ROWS], ((2, 6), ((2, 6), at(None, None)))),
        X,
    ),
    "blocks that do not fit": (called(copy, (4,), [ROWS], ((7, 6), ROWS)), (7, 6)),
    "the first blocks": (called(copy, (3,), [ROWS], ((6, 6), ROWS)), X),
    "on the diagonal": (
        called(copy, (2,), [((2, 2), at(0, 0))], ((4, 2), ((2, 2), at(0, None)))),
        (4, 4),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_whose_programs_know_of_each_other_runs_whole(name: str) -> None:
    call, shape = REFUSED[name]
    (eqn,) = jax.make_jaxpr(call)(jnp.ones(shape)).eqns
    assert eqn.primitive.name == "pallas_call" and rule_of(eqn) is None


@jax.custom_vjp
def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Rows `[B, D]` times `scale`, `[1, D]`, two at a time."""
    width = x.shape[1]
    pair: Block = ((2, width), at(0, None))
    one: Block = ((1, width), at(None, None))
    grid = (x.shape[0] // 2,)
    return called(scaled, grid, [pair, one], (x.shape, pair))(x, scale)


norm.defvjp(
    lambda x, scale: (norm(x, scale), (x, scale)),
    lambda kept, g: (norm(g, kept[1]), (g * kept[0]).sum(0, keepdims=True)),
)


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * scale


def training_step(norm: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(norm(x @ p["in"], p["scale"])) @ p["out"]).mean()

    def step(p: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    return step


def parameters() -> dict[str, jax.Array]:
    shapes = {"in": (6, 16), "scale": (1, 16), "out": (16, 5)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(9), 3), strict=True))
    return {n: jax.random.normal(keys[n], s) / 3 for n, s in shapes.items()}


def test_a_kernel_trains_as_plain_jax_and_gathers_no_batch() -> None:
    step, state = training_step(norm), parameters()
    x = jax.random.normal(jax.random.key(8), (32, 6))
    assert_parity(step, MESH, state, x, min_size=0)
    sent = [
        sorted((c.op, *sorted(c.shape)) for c in made.plan(state, x).collectives)
        for made in (
            shardfn.fully_shard(training_step(f), MESH, min_size=0)
            for f in (norm, plain_norm)
        )
    ]
    assert sent[0] == sent[1]


def test_devices_that_do_not_divide_the_programs_run_it_whole() -> None:
    """Four programs, eight devices: the batch is gathered for the kernel."""
    assert_parity(training_step(norm), MESH, parameters(), jnp.ones((8, 6)), min_size=0)


def test_a_dimension_whose_size_an_operand_says_stays_whole() -> None:
    """Next to others that are split; as splash attention's over blocks that count."""

    def twice(count: jax.Array, x: jax.Array) -> jax.Array:
        def run(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = 2 * x_ref[...]

        block = pl.BlockSpec((2, 3), at(0, 1))
        return pl.pallas_call(
            run,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // 2, count),
            in_specs=[block],
            out_specs=block,
            interpret=True,
        )(x)

    eqn, _ = equation_of(twice, jnp.int32(2), jnp.ones((32, 6)), name="pallas_call")
    assert str(rule_of(eqn)) == ", (p0 a) b -> (p0 c) d  whole={a, b, c, d}"
    x = jax.random.normal(jax.random.key(3), (32, 6))

    def step(state: Any, x: jax.Array) -> Any:
        return state, twice(state["count"], x @ state["w"])

    state = {"count": jnp.int32(2), "w": jnp.eye(6)}
    assert_parity(step, MESH, state, x, min_size=0)


def test_a_mapped_kernel_is_split_along_what_it_is_mapped_over() -> None:
    """Though its programs count, along a dimension of their own."""
    count = called(
        counted,
        (4,),
        [ROWS],
        (X, ROWS),
        scratch_shapes=[pltpu.VMEM((2, 6), jnp.float32)],
    )
    eqn, _ = equation_of(jax.vmap(count), jnp.ones((16, *X)), name="pallas_call")
    expected = "(p0 a) b c -> (p0 d) e f  whole={a, b, c, d, e, f}"
    assert str(rule_of(eqn)) == expected


def test_a_kernel_picks_its_rows_by_numbers_that_come_first() -> None:
    """Row `ids[i]` of a table, which stays whole, to row `i`."""

    def picked(ids: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
        def run(_: Any, row_ref: Any, x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = row_ref[...] * x_ref[...]

        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, x.shape[1]),
            in_specs=[
                pl.BlockSpec((1, 3), lambda i, j, ids: (ids[i], 0)),
                pl.BlockSpec((1, 1, 3), lambda i, j, ids: (i, j, 0)),
            ],
            out_specs=pl.BlockSpec((1, 1, 3), lambda i, j, ids: (i, j, 0)),
        )
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(run, out_shape=out, grid_spec=grid, interpret=True)(
            ids, rows, x
        )

    args = (jnp.array([4, 1]), jnp.ones((5, 3)), jnp.ones((2, 8, 3)))
    eqn, _ = equation_of(picked, *args, name="pallas_call")
    expected = "a, b c, d (p1 e) f -> g (p1 h) i  whole={a, b, c, d, e, f, g, h, i}"
    assert str(rule_of(eqn)) == expected


def flash(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(*qkv, causal=True)


def splash(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention

    size, heads = qkv[0].shape[2], qkv[0].shape[1]
    causal = splash_attention.CausalMask((size, size))
    mask = splash_attention.MultiHeadMask([causal] * heads)
    kernel = splash_attention.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    return jax.vmap(kernel)(*qkv)


def of_triton(*qkv: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import mha

    rows = (x.swapaxes(1, 2) for x in qkv)
    return mha(*rows, None, causal=True).swapaxes(1, 2)


TPUS, GPUS = "tpu:v5p:2x2x1", "h100:4"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Pallas on Triton
@pytest.mark.parametrize(
    "target, attend",
    [
        pytest.param(target, attend, marks=pytest.mark.aot(target))
        for target, attend in ((TPUS, flash), (TPUS, splash), (GPUS, of_triton))
    ],
)
def test_attention_gathers_weights_and_no_activations(
    target: str, attend: Callable[..., jax.Array]
) -> None:
    """JAX's own kernels and their derivatives, as compilers make them."""
    layers, heads, size, width = 3, 2, 256, 128

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        def by_heads(name: str) -> jax.Array:
            y = (x @ weights[name]).reshape(*x.shape[:2], heads, width)
            return y.swapaxes(1, 2)

        out = attend(*map(by_heads, "qkv")).swapaxes(1, 2).reshape(x.shape)
        return x + out @ weights["o"], None

    def step(state: Any, x: jax.Array) -> Any:
        def loss(state: Any) -> jax.Array:
            low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), state)
            out, _ = jax.lax.scan(jax.checkpoint(layer), x.astype(jnp.bfloat16), low)
            return jnp.square(out.astype(jnp.float32)).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    model = heads * width
    shape = jax.ShapeDtypeStruct((layers, model, model), jnp.float32)
    args = (
        dict.fromkeys("qkvo", shape),
        jax.ShapeDtypeStruct((8, size, model), jnp.float32),
    )
    sharded = shardfn.fully_shard(step, targets.mesh(target), min_size=0)
    plan = sharded.plan(*args)
    gathered = [c for c in plan.collectives if c.op == "all_gather"]
    assert {c.path for c in gathered} == {*"qkvo"}
    assert {c.op for c in plan.collectives} <= {
        *("all_gather", "psum_scatter", "all_reduce")
    }
    assert plan.verify(sharded.lower(*args).compile()).ok


def test_a_kernel_that_loops_once_is_planned() -> None:
    """Its values are in references, which a trip of a loop on its own may change."""

    def run(x_ref: Any, out_ref: Any) -> None:
        def body(count: jax.Array, _: None) -> tuple[jax.Array, None]:
            out_ref[...] = 2 * x_ref[...]
            return count + 1, None

        trips, _ = jax.lax.scan(body, jnp.float32(0), None, length=1)
        out_ref[...] += trips

    pair: Block = ((2, 5), at(0, None))

    def step(w: jax.Array, x: jax.Array) -> Any:
        y = called(run, (x.shape[0] // 2,), [pair], ((x.shape[0], 5), pair))(x @ w)
        return w - y.mean(0), y.sum()

    args = (jnp.ones((5, 5)), jnp.ones((16, 5)))
    assert shardfn.fully_shard(step, MESH, min_size=0).plan(*args).operations_hash
    assert_parity(step, MESH, *args, min_size=0)
