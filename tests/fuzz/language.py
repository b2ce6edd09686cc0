"""Random programs as frozen values: what they are, and how they run as a plain step.

In: a `Program`. Out: the state, batches and pure training step that it stands for. Its
repr is Python that makes it again, so a failure can be pasted into a test.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LEARNING_RATE = 0.125
DTYPES = {"f": jnp.float32, "i": jnp.int32, "b": jnp.bool_}


@dataclass(frozen=True)
class Type:
    """Shape of an array, and its dtype: "f", "i", "b", or "k" for PRNG keys."""

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


def make_step(
    program: Program, operations: dict[str, Callable[..., Any]]
) -> Callable[[Any, Any], Any]:
    """The plain training step of `program`."""

    def loss_fn(params: Any, state: Any, key: Any, batch: Any) -> Any:
        env = {**named("p", params), **named("c", state["counts"]), "key": key}
        env = run_block(program.forward, {**env, **named("b", batch)}, operations)
        total = jnp.mean if program.mean else jnp.sum
        loss = sum((total(env[name]) for name in program.losses), jnp.float32(0))
        return loss, [env[name] for name in program.forward.outputs]

    wrap = {"": lambda f: f, "jit": jax.jit, "remat": jax.checkpoint}[program.wrap]
    grad_fn = jax.value_and_grad(wrap(loss_fn), has_aux=True)

    def grads_of(state: Any, key: Any, batch: Any) -> Any:
        if program.micro == 1:
            return grad_fn(state["params"], state, key, batch)

        def one(total: Any, x: Any) -> Any:
            (loss, aux), grads = grad_fn(state["params"], state, key, x)
            return jax.tree.map(jnp.add, total, (loss, grads)), aux

        parts = [x.reshape(program.micro, -1, *x.shape[1:]) for x in batch]
        zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, state["params"])
        (loss, grads), aux = jax.lax.scan(one, zero, parts)
        return (loss, aux), grads

    def step(state: Any, batch: Any) -> Any:
        key, now = jax.random.split(state["key"])
        (loss, aux), grads = grads_of(state, now, batch)
        norm = jnp.sqrt(sum((jnp.vdot(g, g) for g in grads), jnp.float32(1)))
        if program.clip:
            grads = [g / jnp.maximum(1.0, norm / 8) for g in grads]
        params, opt = update(program.optimizer, state["params"], grads, state["opt"])
        counts = [c + 1 for c in state["counts"]]
        new = {"params": params, "opt": opt, "counts": counts, "key": key}
        return new, {"loss": loss, "norm": norm, "aux": aux}

    return step


def update(optimizer: str, params: Any, grads: Any, opt: Any) -> tuple[Any, Any]:
    """New parameters and moments. Adam's epsilon is large: rounding has to stay so."""
    if optimizer == "sgd":
        return [p - LEARNING_RATE * g for p, g in zip(params, grads, strict=True)], opt
    if optimizer == "momentum":
        opt = [0.5 * m + g for m, g in zip(opt, grads, strict=True)]
        return [p - LEARNING_RATE * m for p, m in zip(params, opt, strict=True)], opt
    moments = [
        (0.5 * m + 0.5 * g, 0.5 * v + 0.5 * g * g)
        for (m, v), g in zip(opt, grads, strict=True)
    ]
    moves = [m / (jnp.sqrt(v + 1e-2)) for m, v in moments]
    if optimizer == "lamb":
        moves = [
            u * (jnp.linalg.norm(p) + 1) / (jnp.linalg.norm(u) + 1)
            for p, u in zip(params, moves, strict=True)
        ]
    return [p - LEARNING_RATE * u for p, u in zip(params, moves, strict=True)], moments


def make_state(program: Program) -> Any:
    """The first state: small integers."""
    rng = np.random.default_rng(1)
    params = [_data(rng, t) for t in program.params]
    zeros = [np.zeros(t.shape, np.float32) for t in program.params]
    opt: Any = {"sgd": [], "momentum": zeros}.get(
        program.optimizer, [(z, z) for z in zeros]
    )
    counts = [_data(rng, t) for t in program.counts]
    state = {"params": params, "opt": opt, "counts": counts, "key": jax.random.key(3)}
    return jax.tree.map(jnp.asarray, state)


def make_batch(program: Program, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(100 + seed)
    return [_data(rng, t) for t in program.batch]


def _data(rng: np.random.Generator, type_: Type) -> np.ndarray:
    if type_.dtype == "b":
        return rng.integers(0, 2, type_.shape).astype(bool)
    low = 0 if type_.dtype == "i" else -2
    dtype = np.int32 if type_.dtype == "i" else np.float32
    return rng.integers(low, 3, type_.shape).astype(dtype)
