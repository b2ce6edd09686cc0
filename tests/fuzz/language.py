"""Random programs as frozen values: what they are, and how their code runs.

In: a `Program`'s parts. Out: what the code computes. A program's repr is Python that
makes it again, so a failure can be pasted into a test; `steps.py` says what training
step it stands for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {
    "f": jnp.float32,
    "i": jnp.int32,
    "b": jnp.bool_,
    "B": jnp.uint8,
    "y": jnp.int8,
    "H": jnp.uint16,
    "h": jnp.int16,
    "I": jnp.uint32,
}
NARROW = "ByHhI"
"""Integers that wrap around soon, or have no sign."""

INTEGERS = "i" + NARROW


@dataclass(frozen=True)
class Type:
    """Shape of an array, and its dtype: a key of `DTYPES`, or "k" for PRNG keys."""

    shape: tuple[int, ...]
    dtype: str = "f"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        key = jax.eval_shape(lambda: jax.random.key(0)).dtype
        return jax.ShapeDtypeStruct(self.shape, DTYPES.get(self.dtype, key))

    @classmethod
    def of(cls, x: Any) -> "Type":
        names = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}
        return cls(tuple(x.shape), names.get(x.dtype, "k"))

    def __repr__(self) -> str:
        dtype = "" if self.dtype == "f" else f", {self.dtype!r}"
        return f"Type({self.shape}{dtype})"


@dataclass(frozen=True)
class Call:
    """One operation on named values; its results are called `v0`, `v1`, ... in order.

    Attributes:
      op: name of the operation, a function in `operations`.
      args: names of values.
      params: `(name, value)` of its keyword arguments.
      bodies: what control flow runs.
    """

    op: str
    args: tuple[str, ...]
    params: tuple[tuple[str, Any], ...] = ()
    bodies: "tuple[Block, ...]" = ()

    def __repr__(self) -> str:
        rest = [repr(x) for x in (self.params, self.bodies)]
        while rest and rest[-1] == "()":
            rest.pop()
        return f"Call({', '.join([repr(self.op), repr(self.args), *rest])})"


@dataclass(frozen=True)
class Block:
    """Straight-line code. Inputs of a body are called `i0`, `i1`, ..."""

    calls: tuple[Call, ...]
    outputs: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Block({self.calls}, {self.outputs})"


@dataclass(frozen=True)
class Program:
    """A training step.

    Attributes:
      params: float leaves of the state, called `p0`, `p1`, ...
      counts: integer leaves of the state, `c0`, ...; the state also holds a key, `key`.
      batch: leaves of the batch, `b0`, ..., with the rows first.
      forward: the code; its outputs are the metrics.
      losses: names of the values whose sums make up the loss.
      mean: whether their means do instead.
      optimizer: "sgd", "momentum", "adam" or "lamb".
      clip: whether the gradients are clipped by their global norm.
      wrap: what the loss is wrapped in: "", "jit" or "remat".
      micro: number of microbatches, over which gradients are summed in a scan.
      mesh: name of the mesh.
      min_size: as in `fully_shard`.
      options: `(name, value)` of further arguments of `fully_shard`.
      grads: which gradients a step takes: "one"; "two", of the parameters in turn,
        as of two networks; "inner", the loss holding the gradient in the batch;
        "unrolled", the loss behind an update.
      form: how the step takes and gives its arguments; see `steps.FORMS`.
      between: what happens to the state after a step; see `journeys.py`.
      alias: which arrays are the same one: "" for none, "leaves" for two of the state,
        "buffers" for two arrays on the same buffers, "batch" for one of the state and
        one of the batch.
      setting: a setting of JAX under which all runs; see `meshes.py`.
    """

    params: tuple[Type, ...]
    batch: tuple[Type, ...]
    forward: Block
    losses: tuple[str, ...]
    counts: tuple[Type, ...] = ()
    mean: bool = False
    optimizer: str = "sgd"
    clip: bool = False
    wrap: str = ""
    micro: int = 1
    mesh: str = "2"
    min_size: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    grads: str = "one"
    form: str = "state"
    between: str = ""
    alias: str = ""
    setting: str = ""

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"Program({', '.join(given)})"

    def __str__(self) -> str:
        rest = {k: v for k, v in vars(self).items() if k != "forward"}
        head = ", ".join(f"{k}={v!r}" for k, v in rest.items())
        return "\n".join([head, *lines(self.forward)])


def lines(block: Block, indent: str = "  ") -> list[str]:
    """A block as text to read."""
    out = []
    for call in block.calls:
        params = "".join(f", {k}={v!r}" for k, v in call.params)
        out.append(f"{indent}{call.op}({', '.join(call.args)}{params})")
        for body in call.bodies:
            out += lines(body, f"{indent}  | ")
    return [*out, f"{indent}return {', '.join(block.outputs)}"]


def run_block(
    block: Block, env: dict[str, Any], operations: dict[str, Callable[..., Any]]
) -> dict[str, Any]:
    """Runs `block` on named values; returns all values by name."""
    env = dict(env)
    count = 0
    for call in block.calls:
        for x in run_call(call, env, operations):
            env[f"v{count}"] = x
            count += 1
    return env


def run_call(
    call: Call, env: dict[str, Any], operations: dict[str, Callable[..., Any]]
) -> Sequence[Any]:
    """The results of one call."""

    def runs(body: Block) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any) -> tuple[Any, ...]:
            inner = run_block(body, named("i", args), operations)
            return tuple(inner[name] for name in body.outputs)

        return run

    bodies = {"bodies": tuple(map(runs, call.bodies))} if call.bodies else {}
    args = [env[name] for name in call.args]
    out = operations[call.op](*args, **dict(call.params), **bodies)
    return out if isinstance(out, (tuple, list)) else [out]


def named(prefix: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{prefix}{i}": x for i, x in enumerate(values)}
