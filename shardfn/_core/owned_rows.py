"""`read_owned_p` and `add_owned_p`: rows of a table, asked of those that own them.

In: a table, and for each device the rows that are asked of it, which lie in its block;
of what is added also the updates. Out: the rows, or the table. -1 asks for no row: it
gives zeros, and adds nothing. No user binds them: programs are rewritten to them where
rows are looked up, so that devices exchange what they ask for, and not all of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

read_owned_p = Primitive("read_owned")
add_owned_p = Primitive("add_owned")


def read_block(table: jax.Array, asked: jax.Array, start: jax.Array | int) -> jax.Array:
    """What a block that begins at row `start` gives for what is asked of it."""
    at = _within(table, asked, start)
    return table.at[at].get(mode="fill", fill_value=0)


def add_to_block(
    table: jax.Array,
    asked: jax.Array,
    updates: jax.Array,
    start: jax.Array | int,
    *,
    subtracts: bool,
) -> jax.Array:
    """A block that begins at row `start`, with updates added or subtracted."""
    at = _within(table, asked, start)
    if subtracts:
        return table.at[at].subtract(updates, mode="drop")
    return table.at[at].add(updates, mode="drop")


def _within(table: jax.Array, asked: jax.Array, start: jax.Array | int) -> jax.Array:
    """Rows of a block; one behind its last where no row is asked for."""
    return jnp.where(asked < 0, jnp.int32(table.shape[0]), asked - start)


@read_owned_p.def_abstract_eval
def _rows(table: Any, asked: Any) -> Any:
    return ShapedArray((*asked.shape, *table.shape[1:]), table.dtype)


@add_owned_p.def_abstract_eval
def _added(table: Any, *_: Any, subtracts: bool) -> Any:
    del subtracts
    return ShapedArray(table.shape, table.dtype)


def _read_whole(table: jax.Array, asked: jax.Array) -> jax.Array:
    return read_block(table, asked, 0)


def _add_whole(
    table: jax.Array, asked: jax.Array, updates: jax.Array, *, subtracts: bool
) -> jax.Array:
    return add_to_block(table, asked, updates, 0, subtracts=subtracts)


for _primitive, _whole in ((read_owned_p, _read_whole), (add_owned_p, _add_whole)):
    _primitive.def_impl(_whole)
    mlir.register_lowering(_primitive, mlir.lower_fun(_whole, multiple_results=False))
