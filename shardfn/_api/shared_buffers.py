"""Arrays that share buffers: donated twice, or donated and read, a buffer ends the
process.

In: the arrays of a state, which is donated, and others. Out: the state's arrays, where
those that share a buffer are copied.

Buffers are looked at only where arrays may share some: one of a batch shares none with
what was made after a call that it was given to, and arrays with other shards share
none, but through NumPy and DLPack: XLA donates no buffer that is lent to those.
"""

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from shardfn._api.known_arrays import last_states, next_call
from shardfn._core import compat
from shardfn.storage._mesh_context import on_mesh_of

SEEN = "_shardfn_seen"
"""Attribute of an array of a batch: the number of a call that it was given to. It
shares no buffer with what was made later."""


def apart_from(
    batch: Sequence[Any],
    state: list[Any],
    made: int,
    by_kind: Mapping[Hashable, Sequence[int]],
) -> list[Any]:
    """The arrays of a state that one call made, so that they share no buffer among
    each other, where none shares a buffer with one of a batch.

    Args:
      batch: the arrays of the batch among others.
      state: the arrays.
      made: the number of the call that made all of `state`.
      by_kind: positions in `state` by the kind of a shard.

    Returns:
      The arrays, or copies of some.
    """
    given = [x for x in batch if type(x) in compat.CONCRETE_ARRAYS]
    strange = [x for x in given if getattr(x, SEEN, made) >= made]
    alike = [x for x in strange if shard_kind(x) in by_kind]
    if alike:
        known, same = last_states.calls(), set(map(id, alike))
        # One that a call made has buffers of its own.
        taken = set().union(*(_buffers(x) for x in alike if id(x) not in known))
        state = list(state)
        for i in {i for x in alike for i in by_kind[shard_kind(x)]}:
            if id(state[i]) in same or (taken and _buffers(state[i]) & taken):
                state[i] = _copy(state[i])
    _mark_all(strange)
    return state


def apart(state: list[Any], batch: Sequence[Any]) -> list[Any]:
    """The arrays of a state of which nothing is known as a whole, where none shares a
    buffer with another one or with one of the batch.

    Args:
      state: the arrays.
      batch: those of the batch among others.

    Returns:
      The arrays, or copies of some.
    """
    given = [x for x in batch if type(x) in compat.CONCRETE_ARRAYS]
    calls, made = last_states.calls(), 0
    if len(set(map(id, state))) == len(state):
        made = min([calls.get(id(x), 0) for x in state], default=0)
    strange = [x for x in given if getattr(x, SEEN, made) >= made]
    if not made:
        strange += state
    strange = [x for x in strange if id(x) not in calls]
    arrays = {*map(id, state), *map(id, given)}
    if not strange and len(arrays) == len(state) + len(given):
        return state
    # Of others, those are looked at whose shards are alike.
    kinds = set(map(shard_kind, strange)) - {None}
    alike = [x for x in given if shard_kind(x) in kinds]
    taken = set().union(*map(_buffers, alike))
    seen, out = set(map(id, given)), []
    for x in state:
        buffers = _buffers(x) if shard_kind(x) in kinds else set()
        if id(x) in seen or taken & buffers:
            x = _copy(x)
        seen.add(id(x))
        taken |= buffers
        out.append(x)
    _mark_all(given)
    return out


def mark_seen(x: jax.Array, like: jax.Array) -> None:
    """Marks an array that may have the buffers of `like` as given to the call that
    that was first given to."""
    _mark_all([like])
    setattr(x, SEEN, getattr(like, SEEN))


def _mark_all(arrays: Iterable[jax.Array]) -> None:
    """Marks those that no call was given before."""
    for x in arrays:
        if not hasattr(x, SEEN):
            setattr(x, SEEN, next_call())


def shard_kind(x: Any) -> Hashable | None:
    """Shape and dtype of the shards of an array, or of what describes one; for keys of
    random numbers, those of the numbers that they are. None if it has no values."""
    if x.dtype == jax.dtypes.float0:
        return None
    shape = x.sharding.shard_shape(x.shape)
    return (
        _numbers_of_keys(shape, x.dtype) if compat.is_key(x.dtype) else (shape, x.dtype)
    )


@functools.lru_cache(maxsize=64)
def _numbers_of_keys(shape: tuple[int, ...], dtype: Any) -> Hashable:
    numbers = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return numbers.shape, numbers.dtype


def _copy(x: jax.Array) -> jax.Array:
    with on_mesh_of(x):
        return jax.numpy.copy(x)


def _buffers(x: jax.Array) -> set[Any]:
    """The buffers of an array in this process."""
    return {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for shard in x.addressable_shards
    }
