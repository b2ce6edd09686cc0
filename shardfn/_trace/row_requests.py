"""Lookups in a table of rows, as requests to the devices that own the rows.

In: the numbers of the rows that a batch looks up. Out: functions that read or update
these rows in rounds: in each a device asks every other for at most so many rows, and a
loop goes on until all are served. A device asks for a row once, however often it looks
it up, and sums what it adds to it. How many rows one device asks of another depends on
the data; in shapes, nothing does.

Arrays have a dimension N for devices and M for the lookups of each. Everything but
`read_owned_p` and `add_owned_p` goes row by row of N.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardfn._core.constraint import split_rows
from shardfn._core.limits import ASKED_SPREAD
from shardfn._core.owned_rows import add_owned_p, read_owned_p

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class RowRequests:
    """Lookups in a table whose rows devices own.

    Attributes:
      rows: of the table.
      devices: that own blocks of them.
      lookups: of each device.
      axis: the mesh axis over which they are.
    """

    rows: int
    devices: int
    lookups: int
    axis: str

    @property
    def block(self) -> int:
        """Rows that a device owns, or that its block has room for."""
        return -(-self.rows // self.devices)

    @property
    def at_once(self) -> int:
        """Rows that a device asks of each other in a round: all that it looks up, if
        they are spread evenly over the devices, up to what chance alone adds."""
        mean = self.lookups / self.devices
        spread = math.ceil(mean + ASKED_SPREAD * math.sqrt(mean))
        return max(1, min(spread, self.lookups, self.block))

    def round_bytes(self, row: int) -> int:
        """Bytes that a device sends in a round, for rows of so many bytes."""
        asked = self.devices * self.at_once
        return asked * (row + jnp.dtype(jnp.int32).itemsize)

    def routed(self, where: jax.Array) -> Arrays:
        """What each device asks for, of which device and in which round.

        Args:
          where: int32 [N, M], the rows looked up.

        Returns:
          The rows asked for, each once, sorted, -1 elsewhere; where in a message each
          is, and in which round; the lookups in this order; which of the different rows
          each of these is; the place and the round of each lookup as given; and the
          number of rounds.
        """
        count, owners = self.lookups, self.devices

        def route(where: jax.Array) -> Arrays:
            numbers = lax.iota(jnp.int32, count)
            row, order = lax.sort((where, numbers), num_keys=1, is_stable=True)
            before = lax.concatenate([jnp.full(1, -1, jnp.int32), row[:-1]], 0)
            is_first = row != before
            which = lax.cumsum(is_first.astype(jnp.int32)) - 1
            owner = lax.div(row, jnp.int32(self.block))
            asks = jnp.zeros(owners, jnp.int32)
            asks = asks.at[owner].add(is_first.astype(jnp.int32))
            # Of those asked of one device, each has a number.
            number = which - (lax.cumsum(asks) - asks)[owner]
            most = jnp.int32(self.at_once)
            place = owner * most + lax.rem(number, most)
            turn = lax.div(number, most)
            asked = jnp.where(is_first, row, -1)
            given = (
                jnp.zeros(count, jnp.int32).at[order].set(x) for x in (place, turn)
            )
            return asked, place, turn, order, which, *given, asks

        *routed, asks = jax.vmap(route)(self._split(where))
        most = jnp.int32(self.at_once)
        return *routed, lax.div(jnp.max(asks) + most - 1, most)

    def read(self, table: jax.Array, *routed: jax.Array) -> jax.Array:
        """The rows of each lookup, [N, M, ...]."""
        asked, place, turn, _, _, place_of, turn_of, rounds = routed
        row = table.shape[1:]

        def body(carry: Arrays) -> Arrays:
            now, found = carry
            at = self._places(asked, place, turn, now)
            requests = self._sent(jax.vmap(self._message)(at, asked))
            served = read_owned_p.bind(table, requests)
            came = jnp.moveaxis(served, 0, 1)
            came = came.reshape(self.devices, self.devices * self.at_once, *row)
            came = self._split(came)
            rows = jax.vmap(lambda xs, at: xs.at[at].get(mode="clip"))(came, place_of)
            mine = (turn_of == now).reshape(*turn_of.shape, *(1 for _ in row))
            return now + jnp.int32(1), jnp.where(mine, rows, found)

        none = jnp.zeros((self.devices, self.lookups, *row), table.dtype)
        return self._rounds(rounds, body, self._split(none))

    def add(
        self, subtracts: bool, table: jax.Array, updates: jax.Array, *routed: jax.Array
    ) -> jax.Array:
        """The table with updates [N, M, ...] added to the rows of the lookups."""
        asked, place, turn, order, which, _, _, rounds = routed
        row = table.shape[1:]

        def of_row(updates: jax.Array, order: jax.Array, which: jax.Array) -> Any:
            each = updates.at[order].get(mode="clip")
            sums = jnp.zeros_like(updates)
            return sums.at[which].add(each, indices_are_sorted=True)

        sums = jax.vmap(of_row)(self._split(updates), order, which)

        def body(carry: Arrays) -> Arrays:
            now, table = carry
            at = self._places(asked, place, turn, now)
            requests = self._sent(jax.vmap(self._message)(at, asked))
            chosen = jax.vmap(self._message)(at, which)
            chosen = jnp.where(chosen < 0, jnp.int32(self.lookups), chosen)
            message = jax.vmap(lambda xs, at: xs.at[at].get(mode="fill", fill_value=0))
            sent = self._sent(message(sums, chosen), *row)
            table = add_owned_p.bind(table, requests, sent, subtracts=subtracts)
            return now + jnp.int32(1), table

        return self._rounds(rounds, body, table)

    def _rounds(self, rounds: jax.Array, body: Any, start: jax.Array) -> jax.Array:
        carry = jnp.int32(0), start
        return lax.while_loop(lambda carry: carry[0] < rounds, body, carry)[1]

    def _places(
        self, asked: jax.Array, place: jax.Array, turn: jax.Array, now: jax.Array
    ) -> jax.Array:
        """Where in a round's message each row is; behind its end if it is not in it."""
        end = jnp.int32(self.devices * self.at_once)
        return jnp.where((asked >= 0) & (turn == now), place, end)

    def _message(self, at: jax.Array, x: jax.Array) -> jax.Array:
        """A device's message of a round: `x` at its places, -1 elsewhere."""
        none = jnp.full(self.devices * self.at_once, -1, jnp.int32)
        return none.at[at].set(x, mode="drop")

    def _sent(self, x: jax.Array, *row: int) -> jax.Array:
        """Messages [N, ...] by the devices that they are for."""
        x = x.reshape(self.devices, self.devices, self.at_once, *row)
        return self._split(jnp.moveaxis(x, 1, 0))

    def _split(self, x: jax.Array) -> jax.Array:
        """An array [N, ...], of which each device has its own part."""
        return split_rows(x, (self.axis,), 0)
