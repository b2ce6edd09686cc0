"""The program in which rows of a table are asked of the devices that own them.

In: a program, and which of its nodes look up rows of a table, or add to them. Out: the
program with what `_trace.row_requests` makes of these nodes in their place. Lookups of
the same rows share what says whom to ask.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardfn._core.index_bounds import clamped, fill_of, in_bounds
from shardfn._core.program import Atom, Node, Program, aval_of
from shardfn._core.sharding import Axes
from shardfn._lowering.constrained_values import BodyPath, in_body
from shardfn._trace.inlined import Inlined
from shardfn._trace.row_requests import RowRequests


@dataclass(frozen=True, slots=True)
class Lookup:
    """A node that reads rows of a table, or adds to them.

    Attributes:
      requests: of which rows, of how many devices.
      reads: whether it reads.
      subtracts: whether it subtracts what it is given.
      clamps: whether rows outside of the table are moved into it, not left out.
      fill: what is read in their place if they are left out.
      row: shape of a row.
    """

    requests: RowRequests
    reads: bool
    subtracts: bool
    clamps: bool
    fill: Any
    row: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """Devices, and the lookups of each."""
        return self.requests.devices, self.requests.lookups

    def route(self, indices: jax.Array) -> tuple[jax.Array, ...]:
        """Whom each device asks for the rows that it looks up; a number that lies
        outside of the table is that of its first or last row here."""
        where = clamped(indices, self.requests.rows - 1)
        return self.requests.routed(where.reshape(self.shape))

    def outside(self, indices: jax.Array) -> jax.Array:
        """Which lookups lie outside of the table, for each element of their rows."""
        is_outside = in_bounds(indices, self.requests.rows) < 0
        return is_outside.reshape(*self.shape, *(1 for _ in self.row))

    def read(self, table: jax.Array, _: jax.Array, *routed: jax.Array) -> jax.Array:
        """The rows of all lookups, [N, M, ...]."""
        return self.requests.read(table, *routed)

    def filled(self, found: jax.Array, indices: jax.Array) -> jax.Array:
        """What a node that reads makes of these rows."""
        if not self.clamps:
            fill = jnp.asarray(self.fill, found.dtype)
            found = jnp.where(self.outside(indices), fill, found)
        return found.reshape(*indices.shape[:-1], *self.row)

    def add(
        self,
        table: jax.Array,
        indices: jax.Array,
        updates: jax.Array,
        *routed: jax.Array,
    ) -> jax.Array:
        """What a node makes of a table to which it adds."""
        updates = updates.reshape(*self.shape, *self.row)
        if not self.clamps:
            none = jnp.zeros_like(updates)
            updates = jnp.where(self.outside(indices), none, updates)
        return self.requests.add(self.subtracts, table, updates, *routed)


def lookup_of(program: Program, node: Node, axes: Axes) -> Lookup | None:
    """What a node looks up, if it does so in whole rows of its first operand, by a
    number for each, and the devices divide the numbers; None if not."""
    name, params = node.eqn.primitive.name, node.eqn.params
    devices, axis = axes.sizes[axes.stored], axes.names[axes.stored]
    if name not in ("gather", "scatter-add", "scatter-sub"):
        return None
    reads, numbers = name == "gather", params["dimension_numbers"]
    table, indices = (aval_of(program, atom) for atom in node.inputs[:2])
    made = node.eqn.outvars[0].aval if reads else aval_of(program, node.inputs[2])
    if not all(isinstance(x.dtype, np.dtype) for x in (table, indices)):
        return None
    if reads:
        looked_up, alone = numbers.start_index_map, numbers.collapsed_slice_dims
        along = numbers.offset_dims
    else:
        looked_up = numbers.scatter_dims_to_operand_dims
        alone, along = numbers.inserted_window_dims, numbers.update_window_dims
    by, row = indices.shape[:-1], table.shape[1:]
    whole = made.shape == (*by, *row)  # pyright: ignore
    last = tuple(range(len(by), len(by) + len(row)))
    if looked_up != (0,) or alone != (0,) or along != last or not whole:
        return None
    if numbers.operand_batching_dims or not by or not all(by) or by[0] % devices:
        return None
    lookups = int(np.prod(by)) // devices
    requests = RowRequests(table.shape[0], devices, lookups, axis)
    if (requests.block + 1) * devices > jnp.iinfo(jnp.int32).max or not table.size:
        return None
    mode = params["mode"].name
    clamps = "CLIP" in mode or (reads and "FILL" not in mode)
    fill = fill_of(params, table.dtype) if reads and not clamps else 0
    return Lookup(requests, reads, name == "scatter-sub", clamps, fill, row)


def with_requests(
    program: Program, nodes: Collection[tuple[BodyPath, int]], axes: Axes
) -> Program:
    """The program with the rows of some lookups asked of the devices that own them.

    Args:
      program: the program.
      nodes: the bodies that the lookups are in, and their results.
      axes: the mesh axes.

    Returns:
      The program.
    """
    for path in dict.fromkeys(path for path, _ in nodes):
        results = {value for body, value in nodes if body == path}

        def change(inner: Program, results: Collection[int] = results) -> Program:
            return _LookupBody(inner, axes).with_requests(results)

        program = in_body(program, path, change)
    return program


@dataclass(slots=True)
class _LookupBody:
    """A body while its lookups are replaced.

    Attributes:
      program: the body.
      axes: the mesh axes.
      inlined: what becomes of it.
      routes: by what is looked up, the values that say whom to ask; by the table, too,
        the rows.
    """

    program: Program
    axes: Axes
    inlined: Inlined = field(init=False)
    routes: dict[Hashable, tuple[Atom, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inlined = Inlined(self.program)

    def with_requests(self, results: Collection[int]) -> Program:
        """The body with these results of lookups made by requests."""
        program = self.program
        for node in program.nodes:
            lookup = None
            if not results.isdisjoint(node.outputs):  # pyright: ignore
                lookup = lookup_of(program, node, self.axes)
            if lookup is None:
                self.inlined.nodes.append(node)
            else:
                self.replace(node, lookup)
        return self.inlined.finished()

    def replace(self, node: Node, lookup: Lookup) -> None:
        """Adds what a lookup becomes. Rows that are read twice are asked for once: a
        compiler would merge what does it."""
        inline = self.inlined.inline
        table, indices, *updates = node.inputs
        key = indices, lookup.requests
        if key not in self.routes:
            self.routes[key] = inline(node, lookup.route, [indices])
        operands = [table, indices, *updates, *self.routes[key]]
        run = with_derivative(node, lookup)
        if not lookup.reads:
            inline(node, run, operands, node.outputs)
            return
        key = table, *key
        if key not in self.routes:
            self.routes[key] = inline(node, run, operands)
        found = [*self.routes[key], indices]
        inline(node, lookup.filled, found, node.outputs)


def with_derivative(node: Node, lookup: Lookup) -> Callable[..., jax.Array]:
    """What reads rows, or adds to them, with the derivative that the node has: a loop
    whose rounds depend on data has none that goes backward."""
    run: Any = jax.custom_jvp(lookup.read if lookup.reads else lookup.add)
    params = node.eqn.params
    if lookup.reads:
        params = {**params, "mode": jax.lax.GatherScatterMode.CLIP, "fill_value": None}

    def along(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        table, _, *others = tangents
        changes = [table, primals[1], *others[: 0 if lookup.reads else 1]]
        change = node.eqn.primitive.bind(*changes, **params)
        if lookup.reads:
            change = change.reshape(*lookup.shape, *lookup.row)
        return run(*primals), change

    run.defjvp(along)
    return run
