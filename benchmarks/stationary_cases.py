"""In: names. Out: steps in which leaves are larger than what they meet, the dimensions
on which those are best stored, and the bytes that each device has to send at least.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from stationary_llama import BATCH_SPECS, COLUMNS, Llama, arguments, decode_token

ROWS_OF_BATCH = P("data")


@dataclass(frozen=True)
class Case:
    """A step, and how it is compared.

    Attributes:
      step: the plain step.
      args: its arguments, the state first.
      columns: the dimensions on which leaves are best stored, by path.
      least: bytes that each device has to send if no leaf moves.
      devices: how many.
      returned: the argument of which a new value comes back, if any.
      batch_specs: ways to split the other arguments, by name.
      llama: the model, of a decoded token.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    columns: Mapping[str, Mapping[str, int]]
    least: float
    devices: int = 8
    returned: int | None = 0
    batch_specs: Mapping[str, Any] = field(default_factory=lambda: {"": ROWS_OF_BATCH})
    llama: Llama | None = None


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def part(devices: int) -> float:
    """What a gather or a reduce-scatter sends of a value; an all-to-all sends that of
    one device's block."""
    return (devices - 1) / devices


def sgd(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def train_step(params: Any, *batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def lookup(devices: int = 8, table: int = 2**24) -> Case:
    """26 rows of a table for each of 1024 examples per device, and its update."""
    rows, features, width = 1024 * devices, 26, 64

    def loss_fn(params: Any, found: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.mean(params["table"][found] * weights[:, :, None])

    # An id and a weight of each lookup: rows are multiplied and summed where they are.
    return Case(
        sgd(loss_fn),
        ({"table": f32(table, width)}, ids(rows, features), f32(rows, features)),
        {"table": {"data": -1}},
        part(devices) * 2 * rows * features * 4,
        devices,
    )


def experts() -> Case:
    """64 experts of 1024 x 4096, 8 groups of 1024 tokens, as in GShard."""
    count, width, inner, groups, tokens, capacity = 64, 1024, 4096, 8, 1024, 16

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, params["router"]))
        chosen = jax.nn.one_hot(gates.argmax(-1), count, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 1) * chosen - 1).max(-1).astype(jnp.int32)
        slot = jax.nn.one_hot(place, capacity, dtype=x.dtype)
        sent = chosen[..., None] * slot[:, :, None]
        taken = jnp.einsum("gtec,gtd->egcd", sent, x)
        hidden = jax.nn.relu(jnp.einsum("egcd,edf->egcf", taken, params["up"]))
        made = jnp.einsum("egcf,efd->egcd", hidden, params["down"])
        out = jnp.einsum("gtec,egcd->gtd", sent * gates.max(-1)[..., None, None], made)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    moved = part(8) * count * groups * capacity * width * 2 / 8
    params = {
        "router": bf16(width, count),
        "up": bf16(count, width, inner),
        "down": bf16(count, inner, width),
    }
    return Case(
        sgd(loss_fn),
        (params, bf16(groups, tokens, width)),
        {"up": {"data": 0}, "down": {"data": 0}},
        3 * moved,
    )


def mlp_loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ params["up"])
    return jnp.mean((x + hidden @ params["down"]).astype(jnp.float32) ** 2)


def mlp() -> Case:
    """The MLP of T5-11B, 1024 x 65536, for 512 rows."""
    rows, width, inner = 512, 1024, 65536
    return Case(
        sgd(mlp_loss),
        ({"up": bf16(width, inner), "down": bf16(inner, width)}, bf16(rows, width)),
        {"up": {"data": -1}, "down": {"data": 0}},
        3 * rows * width * 2 * part(8),
    )


def evaluation() -> Case:
    """An MLP of 4096 x 16384 for 8 rows, forward alone."""
    rows, width, inner = 8, 4096, 16384
    return Case(
        mlp_loss,
        ({"up": f32(width, inner), "down": f32(inner, width)}, f32(rows, width)),
        {"up": {"data": -1}, "down": {"data": 0}},
        2 * rows * width * 4 * part(8),
        returned=None,
    )


def decode(rows: int) -> Case:
    """One token of an 8B Llama, with a cache of 2048."""
    model = Llama(rows=rows)
    return Case(
        decode_token,
        arguments(model),
        COLUMNS,
        4 * model.layers * rows * model.width * 2 * part(8),
        returned=1,
        batch_specs=BATCH_SPECS,
        llama=model,
    )


CASES: dict[str, Callable[[], Case]] = {
    "lookup-8": lookup,
    "lookup-64": lambda: lookup(64, 100_000_000),
    "experts": experts,
    "mlp": mlp,
    "evaluation": evaluation,
    "decode-8": lambda: decode(8),
    "decode-64": lambda: decode(64),
    "decode-512": lambda: decode(512),
}
