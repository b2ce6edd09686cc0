"""A leaf that is stored padded or flattened, as one array of the leaf's own shape.

In: the array that stores a leaf, and the leaf's shape. Out: an array for JAX, NumPy and
every library that asks for `jax.Array`, whose values are the whole leaf's. The steps
take the stored array out of it; whatever else uses it gets the leaf put together.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardfn._core import compat
from shardfn._core.memories import is_on_host
from shardfn._core.shown_limits import PRINTED_BYTES
from shardfn.storage._boxes import pieces
from shardfn.storage._mesh_context import automatic, on_mesh_of
from shardfn.storage._padding import to_whole, whole_spec

NOT_FORWARDED = set(
    """
    __annotations__ __del__ __dict__ __doc__ __init__ __module__ __new__ __weakref__
""".split()
)
"""Attributes of the class of arrays that belong to each array itself."""


class StoredArray(jax.Array):
    """A leaf that no dimension divides, as a step stores it.

    `shape`, `dtype`, `sharding` and all else that an array has are those of the leaf
    when it is whole: on every device of the mesh, for JAX has no other sharding of such
    a shape. It is put together when something other than a step uses it, each time.

    Attributes:
      array: the array that stores it: padded, or flattened and padded, and split.
      shape: shape of the leaf.
      name: its path in the state, for messages.
    """

    __slots__ = ("array", "name", "_shape")
    __hash__ = None  # pyright: ignore
    __array_priority__ = 100

    def __init__(self, array: Any, shape: Sequence[int], name: str = "") -> None:
        self.array: Any = array
        self._shape, self.name = tuple(shape), name

    # What it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def weak_type(self) -> bool:
        return getattr(self.array, "weak_type", False)

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return math.prod(self._shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self._shape[0]

    @property
    def sharding(self) -> NamedSharding:
        """How the whole leaf is split: over dimensions that are stored as they are."""
        return whole_sharding(self.array.sharding, self.array.shape, self._shape)

    @property
    def aval(self) -> Any:
        like = jax.ShapeDtypeStruct(
            self._shape, self.dtype, weak_type=self.weak_type, sharding=self.sharding
        )
        return compat.aval_of(like)

    @property
    def committed(self) -> bool:
        return True

    _committed = committed

    @property
    def is_fully_addressable(self) -> bool:
        return self.array.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """Whether a device of this process can have the whole leaf by itself."""
        return self.is_fully_addressable and self.sharding.is_fully_replicated

    def devices(self) -> set[Any]:
        return self.array.devices()

    def on_device_size_in_bytes(self) -> int:
        return self.array.on_device_size_in_bytes()

    def is_deleted(self) -> bool:
        return self.array.is_deleted()

    def delete(self) -> None:
        self.array.delete()

    def block_until_ready(self) -> "StoredArray":
        self.array.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        self.array.copy_to_host_async()

    # Its values

    def whole(self) -> jax.Array:
        """The leaf put together; all processes of the mesh have to call it."""
        self._check_alive()
        return put_together(self.array, self._shape, self.sharding)

    __jax_array__ = whole

    def copy(self) -> "StoredArray":
        self._check_alive()
        with on_mesh_of(self.array):
            return StoredArray(jnp.copy(self.array), self._shape, self.name)

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> "StoredArray":
        return self.copy()

    @property
    def _value(self) -> np.ndarray:
        """The leaf in host memory."""
        self._check_alive()
        if not self.is_fully_addressable:
            self._refuse("is to be read by one process")
        out = np.empty(self._shape, self.dtype)
        for shard in self.array.addressable_shards:
            if shard.replica_id == 0:
                block = np.asarray(shard.data)
                for piece in pieces(self._shape, self.array.shape, shard.index):
                    out[piece.box] = block[piece.source].reshape(piece.shape)
        return out

    def __array__(
        self, dtype: Any = None, copy: bool | None = None, context: Any = None
    ) -> np.ndarray:
        if copy is False:
            raise ValueError("a leaf that is stored in parts has to be copied.")
        return np.asarray(self._value, dtype)

    def __reduce__(self) -> Any:
        here = jnp.asarray(self._value)
        return compat.with_weak_type(here, self.weak_type).__reduce__()

    @property
    def addressable_shards(self) -> Any:
        return self._readable().addressable_shards

    @property
    def global_shards(self) -> Any:
        return self._readable().global_shards

    def addressable_data(self, index: int) -> jax.Array:
        return self._readable().addressable_data(index)

    def __repr__(self) -> str:
        what = f"{self.dtype.name}{list(self.array.shape)} {self.array.sharding.spec}"
        if self.is_deleted():
            return f"StoredArray(shape={self._shape}, deleted, stored as {what})"
        if not self.is_fully_addressable or self.nbytes >= PRINTED_BYTES:
            return f"StoredArray(shape={self._shape}, stored as {what})"
        values = np.array2string(self._value, prefix="StoredArray(", separator=", ")
        return f"StoredArray({values}, stored as {what})"

    def _readable(self) -> jax.Array:
        if not self.is_fully_addressable:
            self._refuse("is to be read by one process")
        return self.whole()

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"state leaf '{self.name}' {what}, and its parts are on devices of several "
            "processes. Put the state together with step.unshard(state, process=0), "
            "or save it with shardfn's checkpoints, in all of them."
        )

    def _check_alive(self) -> None:
        if self.array.is_deleted():
            raise RuntimeError(
                f"state leaf '{self.name}' was donated to an earlier call, or deleted, "
                "and is gone. Use the state that the step returned, or pass "
                "donate=False to fully_shard to keep old states."
            )


def stored_array(x: Any) -> Any:
    """The array that stores a leaf: itself, unless that is padded."""
    return x.array if isinstance(x, StoredArray) else x


def put_together(x: Any, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The whole leaf of `shape` that `x` stores, split as `sharding` says."""
    assert isinstance(sharding.mesh, Mesh)
    untyped = automatic(sharding.mesh)
    with compat.evaluating():
        # Parts of a dimension have no type on a mesh with explicit axes.
        if untyped != sharding.mesh or is_on_host(x):
            x = jax.device_put(x, NamedSharding(untyped, x.sharding.spec))
        whole = _cut(shape, NamedSharding(untyped, sharding.spec))(x)
        return jax.device_put(whole, sharding)


@functools.lru_cache(maxsize=4096)
def _cut(
    shape: tuple[int, ...], sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: to_whole(x, shape), out_shardings=sharding)


@functools.lru_cache(maxsize=4096)
def whole_sharding(
    sharding: NamedSharding, stored: tuple[int, ...], shape: tuple[int, ...]
) -> NamedSharding:
    """The sharding of a whole leaf whose stored array has another one."""
    return NamedSharding(
        sharding.mesh,
        whole_spec(sharding.spec, stored, shape),
        memory_kind=sharding.memory_kind,
    )


def _forwarded(name: str, attribute: Any) -> Any:
    """An attribute of arrays, of the whole leaf."""
    if not callable(attribute):
        return property(lambda self: getattr(self.whole(), name))

    def method(self: StoredArray, *args: Any, **named: Any) -> Any:
        return getattr(self.whole(), name)(*args, **named)

    method.__name__, method.__doc__ = name, getattr(attribute, "__doc__", None)
    return method


def _complete() -> None:
    """Gives stored arrays all that arrays have: operators, methods, properties."""
    array = compat.CONCRETE_ARRAYS[0]
    for name, attribute in vars(array).items():
        if name not in vars(StoredArray) and name not in NOT_FORWARDED:
            setattr(StoredArray, name, _forwarded(name, attribute))
    compat.register_array(StoredArray, StoredArray.whole)


_complete()
