"""In: Pallas kernels in interpret mode, and what they compute in plain JAX. Out: the
numbers of the plain step, rules that say what may be split, and the collectives that
follow."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn.rules import partition_like, rule_of
from shardfn.testing import assert_parity

MESH = jax.make_mesh((8,), ("data",))


def whole_blocks(*refs: Any) -> list[Any]:
    return [pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0)) for x in refs]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """One grid point per example: `[B, T, D]`."""

    def run(q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any) -> None:
        scores = jnp.einsum("td,sd->ts", q_ref[0], k_ref[0])
        scores = jnp.exp(scores - scores.max(-1, keepdims=True))
        out_ref[0] = scores / scores.sum(-1, keepdims=True) @ v_ref[0]

    return pl.pallas_call(
        run,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0],),
        in_specs=whole_blocks(q, k, v),
        out_specs=whole_blocks(q)[0],
        interpret=True,
    )(q, k, v)


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    def run(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] @ w_ref[...]

    shape = (x.shape[0], w.shape[1])
    out = jax.ShapeDtypeStruct(shape, x.dtype)
    return pl.pallas_call(run, out_shape=out, interpret=True)(x, w)


@jax.custom_vjp
def own_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """The same, its derivative two kernels."""
    return matmul(x, w)


own_matmul.defvjp(
    lambda x, w: (matmul(x, w), (x, w)),
    lambda kept, g: (matmul(g, kept[1].T), matmul(kept[0].T, g)),
)


def member(rows: int, sizes: jax.Array) -> jax.Array:
    """Which row belongs to which group, `[rows, groups]`."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows)[:, None]
    return ((row >= ends - sizes) & (row < ends)).astype(jnp.float32)


def grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows `[T, D]` times the matrix `[G, D, F]` of their group, in one grid point."""

    def run(x_ref: Any, w_ref: Any, sizes_ref: Any, out_ref: Any) -> None:
        groups = member(x.shape[0], sizes_ref[...])
        out_ref[...] = jnp.einsum("tg,td,gdf->tf", groups, x_ref[...], w_ref[...])

    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[2]), x.dtype)
    return pl.pallas_call(run, out_shape=out, interpret=True)(x, w, sizes)


@jax.custom_vjp
def own_grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return grouped(x, w, sizes)


def _grouped_back(kept: Any, g: jax.Array) -> Any:
    x, w, sizes = kept
    groups = member(x.shape[0], sizes)
    dx = grouped(g, jnp.swapaxes(w, 1, 2), sizes)
    return dx, jnp.einsum("tg,td,tf->gdf", groups, x, g), None


own_grouped.defvjp(lambda *args: (grouped(*args), args), _grouped_back)


def parameters() -> dict[str, jax.Array]:
    shapes = {"q": (6, 16), "k": (6, 16), "v": (6, 16), "out": (16, 5)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(9), 4), strict=True))
    return {n: jax.random.normal(keys[n], s) / 3 for n, s in shapes.items()}


def training_step(attend: Callable[..., Any], mul: Callable[..., Any]) -> Any:
    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        h = attend(*(x @ p[n] for n in "qkv"))
        return jnp.square(mul(h.reshape(-1, 16), p["out"])).mean()

    def step(p: dict[str, jax.Array], x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), value

    return step


@pytest.mark.parametrize("gradient", ["reference", "kernel"])
def test_kernels_train_as_the_plain_step_and_gather_no_batch(gradient):
    attend = partition_like(attention, plain_attention)
    kernel = own_matmul if gradient == "kernel" else matmul
    mul = partition_like(kernel, jnp.matmul, gradient=gradient)
    step = training_step(attend, mul)
    x, state = jax.random.normal(jax.random.key(8), (16, 3, 6)), parameters()
    assert_parity(step, MESH, state, x, min_size=0)
    plain = training_step(plain_attention, jnp.matmul)
    sent = [
        sorted((c.op, *sorted(c.shape)) for c in made.plan(state, x).collectives)
        for made in (shardfn.fully_shard(f, MESH, min_size=0) for f in (step, plain))
    ]
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("reference", "shapes", "expected"),
    [
        (
            plain_attention,
            [(4, 3, 6)] * 3,
            "a b c, a d c, a d e -> a b e  whole={c, d}",
        ),
        (jnp.matmul, [(4, 3), (3, 5)], "a b, b c -> a c  reduce={b}"),
        (lambda x: 2 * x.sum(0), [(4, 3)], "a b -> b  reduce={a}"),
        (lambda x: x.mean(0), [(4, 3)], "a b -> b  whole={a}"),
        (lambda x: jnp.exp(x.sum(0)), [(4, 3)], "a b -> b  whole={a}"),
        (lambda x: x.sum(0) + x.max(0), [(4, 3)], "a b -> b  whole={a}"),
        (lambda x: x / x.shape[0], [(4, 3)], "a b -> a b  whole={a}"),
        (lambda x: x + jnp.arange(4.0)[:, None], [(4, 3)], "a b -> a b  whole={a}"),
        (lambda x: x @ x.T, [(4, 3)], "a b -> a a  reduce={b}  whole={a}"),
        (lambda x: jnp.sort(x, 0), [(4, 3)], "a b -> a b  whole={a}"),
        (lambda x: x.reshape(-1, 2, 3), [(4, 3)], "(a b) c -> a b c  whole={b, c}"),
        (lambda x: x.reshape(2, -1, 3), [(4, 3)], "(a b) c -> a b c  whole={a, b, c}"),
        (
            lambda x: jnp.stack([x[:, :2], x[:, 4:]], 1),
            [(4, 6)],
            "a b -> a c d  whole={b, c, d}",
        ),
        (lambda x, y: (x.sum(), y), [(4,), (4,)], "a, b -> , b  whole={a, b}"),
    ],
)
def test_what_a_reference_lets_be_split(reference, shapes, expected):
    args = [jnp.zeros(shape) for shape in shapes]
    eqns = jax.make_jaxpr(partition_like(reference, reference))(*args).eqns
    called = eqns[0].params["call_jaxpr"].eqns[-1]
    assert str(rule_of(called)).partition("  blocks")[0] == expected


@pytest.mark.parametrize("gradient", ["reference", "kernel"])
@pytest.mark.parametrize("sizes", [(20, 0, 4), (3, 9, 2)])
def test_a_kernel_is_given_the_groups_of_its_rows(gradient: Any, sizes: Any) -> None:
    """Rows of groups stay where they are; some lie behind the last group."""
    kernel = own_grouped if gradient == "kernel" else grouped
    multiply = partition_like(kernel, jax.lax.ragged_dot, gradient=gradient)

    def step(p: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            out = multiply(batch["x"], p["w"], batch["sizes"])
            return jnp.square(jnp.tanh(out)).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, g: a - g, p, grads), value

    x = jax.random.normal(jax.random.key(8), (24, 6))
    batch = {"x": x, "sizes": jnp.array(sizes)}
    specs = {"x": P("data"), "sizes": P()}
    state = {"w": jax.random.normal(jax.random.key(9), (3, 6, 8))}
    options = {"batch_spec": specs, "min_size": 0, "stationary": False}
    assert_parity(step, MESH, state, batch, **options)
    plan = shardfn.fully_shard(step, MESH, **options).plan(state, batch)
    assert [c.path for c in plan.collectives if c.shape] == ["w", "w"]


def both(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, w, sizes) + jax.lax.ragged_dot(2 * x, w, sizes)


@pytest.mark.parametrize(
    ("reference", "is_split"),
    [
        (jax.lax.ragged_dot, True),
        (both, True),
        (lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes // 2), False),
        (
            lambda x, w, sizes: (
                jax.lax.ragged_dot(x, w, sizes) * sizes.max().astype(x.dtype)
            ),
            False,
        ),
        (lambda x, w, sizes: both(x, w, sizes) + sizes[0].astype(x.dtype), False),
        (
            lambda x, w, sizes: (
                both(x, w, sizes) + sizes[jnp.array([2])].astype(x.dtype)
            ),
            False,
        ),
        (lambda x, w, sizes: (jax.lax.ragged_dot(x, w, sizes), sizes), False),
    ],
)
def test_sizes_of_groups_are_cut_where_they_are_nothing_else(reference, is_split):
    args = jnp.zeros((24, 6)), jnp.zeros((3, 6, 8)), jnp.zeros(3, jnp.int32)
    eqns = jax.make_jaxpr(partition_like(reference, reference))(*args).eqns
    rule = rule_of(eqns[0].params["call_jaxpr"].eqns[-1])
    ((rows, _), *_) = rule.operands
    assert rule.is_splittable(*rows) == is_split


def test_results_of_other_types_are_refused():
    wrong = partition_like(lambda x: x.sum(0), lambda x: x)
    message = (
        r"partition_like got a kernel that returns float32\[3\], and a reference that "
        r"returns float32\[2,3\]\.\n  partition_like was called at .*test_partition"
    )
    with pytest.raises(ValueError, match=message):
        wrong(jnp.ones((2, 3)))
