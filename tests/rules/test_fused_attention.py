"""cuDNN's attention: what its rules let be split, every split against the whole, and
training steps that call it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cudnn_on_cpus import cudnn as cudnn
from jax._src.cudnn import fused_attention_stablehlo as fused
from table import Row, table

import shardfn
from shardfn.testing import assert_parity

pytestmark = pytest.mark.usefixtures("cudnn")

MESH = jax.make_mesh((8,), ("data",))
PADDED, CAUSAL = fused.MaskType.PADDING, fused.MaskType.CAUSAL

LENGTHS = jnp.array([5, 3, 4, 2], jnp.int32)
SEGMENTS = jnp.array([[2, 3], [3, -1], [1, 4], [5, -1]], jnp.int32)
OFFSETS = jnp.array([[0, 2, -1], [0, -1, -1], [0, 1, -1], [0, -1, -1]], jnp.int32)
PACKED = (SEGMENTS, SEGMENTS, OFFSETS, OFFSETS)
# JAX 0.10 takes the keys' heads for as many as the queries'.
IN_SEGMENTS: dict[str, Any] = {
    "names": "q_seqlen kv_seqlen q_offsets kv_offsets",
    "groups": 4,
    "mask_type": CAUSAL,
}


def drawn(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def row(
    expected: str,
    *others: Any,
    names: str = "",
    groups: int = 2,
    backward: bool = False,
    **options: Any,
) -> Row:
    """Attention of four rows of six positions, four heads of queries and `groups` of
    keys, on other arguments of these names, too; or its derivative."""
    shapes = ((4, 6, 4, 8), (4, 6, groups, 8), (4, 6, groups, 7))
    args = (*(drawn(*shape) for shape in shapes), *others)
    if options.get("qkv_layout") == "BNTH":
        args = tuple(x.swapaxes(1, 2) for x in args)

    def forward(*args: Any) -> Any:
        given = dict(zip(names.split(), args[3:], strict=True))
        return fused.dot_product_attention(*args[:3], **given, **options)

    def derivative(*args: Any) -> Any:
        of = range(3 + (names == "bias"))
        return jax.grad(lambda *args: jnp.square(forward(*args)).sum(), of)(*args)

    return Row(
        derivative if backward else forward,
        args,
        expected,
        name=f"dot_product_attention_{'bwd' if backward else 'fwd'}_wrapper",
        needless=("e:max", "e:min"),
        uncounted=(12,) if backward else (2,),
        rtol=1e-4,
    )


@table(
    row(
        "b t (g n) d, b s g d, b s g v, e, e, e, e, e, e, e -> b t (g n) v  "
        "whole={d, e, s, t, v}",
        mask_type=CAUSAL,
    ),
    row(
        "b (g n) t d, b g s d, b g s v, e, e, e, e, e, e, e -> b (g n) t v  "
        "whole={d, e, s, t, v}",
        mask_type=CAUSAL,
        sliding_window_length=2,
        qkv_layout="BNTH",
    ),
    row(
        "b t (g n) d, b s g d, b s g v, xa (g n) t s, e, e, e, e, e, e -> b t (g n) v  "
        "whole={d, e, s, t, v, xa}",
        drawn(1, 4, 6, 6),
        names="bias",
        mask_type=CAUSAL,
    ),
    row(
        "b t (g n) d, b s g d, b s g v, e, b, b, e, e, e, e -> b t (g n) v  "
        "whole={d, e, s, t, v}",
        *(LENGTHS, LENGTHS),
        names="q_seqlen kv_seqlen",
        mask_type=PADDED,
    ),
    row(
        "b t (g n) d, b s g d, b s g v, e, b xa, b xb, b xc, b xd, e, e -> "
        "b t (g n) v  whole={d, e, s, t, v, xa, xb, xc, xd}",
        *PACKED,
        **IN_SEGMENTS,
    ),
)
def test_rule(row):
    row.check()


@table(
    row(
        "b t (g n) d, b s g d, b s g v, e, e, e, e, e, e, e, b (g n) t, b t (g n) v, "
        "b t (g n) v -> b t (g n) d, b s g d, b s g v  reduce={n}  "
        "whole={d, e, s, t, v}",
        mask_type=CAUSAL,
        backward=True,
    ),
    row(
        "b (g n) t d, b g s d, b g s v, e, e, e, e, e, e, e, b (g n) t, b (g n) t v, "
        "b (g n) t v -> b (g n) t d, b g s d, b g s v  reduce={n}  "
        "whole={d, e, s, t, v}",
        groups=1,
        mask_type=CAUSAL,
        qkv_layout="BNTH",
        backward=True,
    ),
    row(
        "b t (g n) d, b s g d, b s g v, xa (g n) t s, e, e, e, e, e, e, b (g n) t, "
        "b t (g n) v, b t (g n) v -> b t (g n) d, b s g d, b s g v, xa (g n) t s  "
        "reduce={b, n}  whole={d, e, s, t, v, xa}",
        drawn(1, 4, 6, 6),
        names="bias",
        backward=True,
    ),
    row(
        "b t (g n) d, b s g d, b s g v, b xa t s, e, e, e, e, e, e, b (g n) t, "
        "b t (g n) v, b t (g n) v -> b t (g n) d, b s g d, b s g v, b xa t s  "
        "reduce={g, n}  whole={d, e, s, t, v, xa}",
        drawn(4, 1, 6, 6),
        names="bias",
        backward=True,
    ),
    row(
        "b t (g n) d, b s g d, b s g v, e, b xa, b xb, b xc, b xd, e, e, "
        "(b xe) (g n) t, b t (g n) v, b t (g n) v -> b t (g n) d, b s g d, b s g v  "
        "reduce={n}  whole={d, e, s, t, v, xa, xb, xc, xd, xe}",
        *PACKED,
        **IN_SEGMENTS,
        backward=True,
    ),
)
def test_rule_of_the_derivative(row):
    row.check()


HEADS, GROUPS, WIDTH, SIZE = 4, 2, 8, 16


def create() -> dict[str, jax.Array]:
    """Two layers of attention, and a bias that all rows share."""
    widths = {"q": HEADS * WIDTH, "k": GROUPS * WIDTH, "v": GROUPS * WIDTH, "o": 32}
    weights = {name: 0.1 * drawn(2, 32, width) for name, width in widths.items()}
    return {**weights, "bias": drawn(HEADS, SIZE, SIZE)}


def attend(layer: Any, x: jax.Array, bias: jax.Array, **options: Any) -> jax.Array:
    def heads(name: str) -> jax.Array:
        return (x @ layer[name]).reshape(*x.shape[:2], -1, WIDTH)

    out = jax.nn.dot_product_attention(
        *map(heads, "qkv"), bias=bias[None], implementation="cudnn", **options
    )
    return x + out.reshape(x.shape[:2] + (-1,)) @ layer["o"]


def train_step(state: Any, batch: Any, **options: Any) -> Any:
    def loss(state: Any) -> jax.Array:
        layers = {name: state[name] for name in "qkvo"}

        @jax.checkpoint
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return attend(weights, x, state["bias"], **options), None

        out, _ = jax.lax.scan(layer, batch["x"], layers)
        return jnp.square(out - batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def batch(rows: int) -> dict[str, jax.Array]:
    return {"x": drawn(rows, SIZE, 32), "y": drawn(rows, SIZE, 32) + 1}


def test_a_step_gathers_weights_and_no_activations():
    step = functools.partial(train_step, is_causal=True)
    plan = shardfn.fully_shard(step, MESH, min_size=0).plan(create(), batch(16))
    gathered = {line.path for line in plan.collectives if line.op == "all_gather"}
    assert gathered == {*"qkvo", "bias"}
    assert {line.op for line in plan.collectives} == {
        *("all_gather", "psum_scatter", "all_reduce")
    }


def test_a_step_computes_what_the_plain_step_does():
    step = functools.partial(train_step, is_causal=True)
    assert_parity(step, MESH, create(), batch(16), min_size=0, steps=3)


def test_rows_of_several_lengths():
    def step(state: Any, batch: Any) -> Any:
        lengths = batch.pop("lengths")
        given = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        return train_step(state, batch, **given)

    lengths = jnp.arange(16, dtype=jnp.int32) % SIZE + 1
    rows = {**batch(16), "lengths": lengths}
    assert_parity(step, MESH, create(), rows, min_size=0, steps=2)


def test_mapped_attention():
    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            layer = {name: state[name][0] for name in "qkvo"}

            def row(x: jax.Array) -> jax.Array:
                return attend(layer, x[None], state["bias"])[0]

            return jnp.square(jax.vmap(row)(batch["x"])).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    assert_parity(step, MESH, create(), batch(16), min_size=0, steps=2)


def test_dropout_depends_on_where_a_row_is_and_runs_on_whole_operands():
    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            query, key, value = (
                (batch["x"] @ state[n][0]).reshape(16, SIZE, -1, WIDTH) for n in "qkv"
            )
            out = fused.dot_product_attention(query, key, value, dropout_rate=0.1)
            return jnp.square(out).mean()

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), {}

    sharded = shardfn.fully_shard(step, MESH, min_size=0)
    named = "primitive 'dot_product_attention_..._wrapper' has no op sharding"
    with pytest.warns(shardfn.UnsupportedPrimitiveWarning, match=named):
        plan = sharded.plan(create(), batch(16))
    assert any(line.fallback for line in plan.collectives)
