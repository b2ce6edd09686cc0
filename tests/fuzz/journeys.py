"""What happens to a state between two steps, and arrays that are the same one.

In: a stored state, and the names in a program's `between` and `alias`. Out: the state
as the next step gets it, with the same values; or an AssertionError.
"""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from language import Program
from surroundings import MESHES

import shardfn


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` of arrays, and typed keys as they are."""
    return lambda x, *rest: x if _is_key(x) else f(x, *rest)


def _same(x: Any) -> Any:
    return x * jnp.ones((), x.dtype)


def _mapped(state: Any, program: Program) -> Any:
    return jax.tree.map(_numbers(_same), state)


def _averaged(state: Any, program: Program) -> Any:
    """An exponential moving average of equal states."""

    def average(x: Any, y: Any) -> Any:
        return (x + y) / 2 if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(_numbers(average), state, state)


def _jitted(state: Any, program: Program) -> Any:
    return jax.jit(lambda s: jax.tree.map(_numbers(_same), s))(state)


def _got(state: Any, program: Program) -> Any:
    return jax.tree.map(_numbers(jax.device_get), state)


def _pickled(state: Any, program: Program) -> Any:
    return jax.tree.map(_numbers(lambda x: pickle.loads(pickle.dumps(x))), state)


def _put(state: Any, program: Program) -> Any:
    return jax.device_put(state, jax.devices()[0])


def _replicated(state: Any, program: Program) -> Any:
    mesh = MESHES[program.mesh].mesh
    return jax.device_put(state, NamedSharding(mesh, PartitionSpec()))


def _moved(state: Any, program: Program) -> Any:
    """The state as a step on half as many devices, or twice, stores it."""
    devices = jax.devices()[: 2 if MESHES[program.mesh].devices > 2 else 4]
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    return shardfn.fully_shard(_unchanged, mesh, min_size=0)(
        state, jnp.zeros((len(devices), 1))
    )[0]


def _unchanged(state: Any, batch: Any) -> Any:
    return state, batch.sum()


JOURNEYS: dict[str, Callable[[Any, Program], Any]] = {
    "": lambda state, program: state,
    "map": _mapped,
    "average": _averaged,
    "jit": _jitted,
    "get": _got,
    "pickle": _pickled,
    "put": _put,
    "replicate": _replicated,
    "mesh": _moved,
}


# Other steps on the same state


def look(state: Any, batch: Any, other: Any) -> Any:
    """A step that reads two states, one of them among the batch."""

    def one(x: Any, y: Any) -> Any:
        if _is_key(x):
            return jax.random.key_data(x)
        rows = jnp.int32(x.shape[0] if x.ndim else 1)
        lowest = jnp.stack([x.min(), y.max()])
        return {
            "rows": rows,
            "ends": lowest,
            "same": (x == y).all(),
            "last": x.ravel()[-1],
        }

    return state, (jax.tree.map(one, state, other), batch.sum())


def look_alike(program: Program, whole: Any, state: Any) -> tuple[Any, Any]:
    """What `look` says of the whole state, and sharded of the stored one.

    The second is taken for a state that is read only, or said to be of the batch.
    """
    layout = MESHES[program.mesh]
    rows = np.ones((layout.divides * 2,), np.float32)
    among_batch = {"state_argnums": 0, "batch_spec": (None, PartitionSpec())}
    step = shardfn.fully_shard(
        look,
        layout.mesh,
        axis=layout.axis,
        min_size=program.min_size,
        donate=False,
        **(among_batch if program.form == "state" else {}),
    )
    return jax.jit(look)(whole, rows, whole)[1], step(state, rows, state)[1]


# The same array twice


def aliased(state: Any, program: Program) -> Any:
    """The state with one array in the place of two of equal types, if it has such."""
    if program.alias not in ("leaves", "buffers"):
        return state
    params = list(state["params"])
    pairs = [
        (i, j)
        for j, y in enumerate(program.params)
        for i, x in enumerate(program.params[:j])
        if x == y
    ]
    for i, j in pairs[:1]:
        params[j] = params[i]
        if program.alias == "buffers" and isinstance(params[i], jax.Array):
            params[j] = jax.device_put(params[i], params[i].sharding)
    return {**state, "params": params}
