"""In: a step that `fully_shard` takes, as it is. Out: the same step under `jit`, its
state stored as shardfn stores it; and of any compiled program what it sends and takes,
read by the same reader and played by the same player.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives
from shardfn.analysis._hlo.play import play
from shardfn.analysis._rates import rates_of

ROWS = PartitionSpec("data")


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step of a compiled program takes on each device.

    Attributes:
      wire: bytes that it sends.
      collectives: how many collectives run; what the compiler has merged is one.
      per_layer: those that run in loops, as a part of the longest loop's iterations.
      largest: bytes of the largest array that a collective moves.
      temporary: bytes of peak temporary memory.
      seconds: predicted; 0 where no target is known.
    """

    wire: float
    collectives: float
    per_layer: float
    largest: int
    temporary: int
    seconds: float


def figures(
    compiled: jax.stages.Compiled, mesh: Mesh | None = None, target: str = ""
) -> Figures:
    """Reads a compiled program, and plays it on `target`, whose devices are `mesh`."""
    text = compiled.as_text() or ""
    moved = [c for c in read_collectives(text) if c.group_size > 1]
    layers = max((c.times for c in moved), default=1)
    seconds = 0.0
    if target and mesh is not None:
        seconds = play(text, rates_of(targets.target(target), mesh)).seconds
    return Figures(
        wire=sum(c.times * c.wire_bytes for c in moved),
        collectives=sum(c.times / c.combined for c in moved),
        per_layer=sum(c.times / c.combined for c in moved if c.times > 1) / layers,
        largest=max((c.bytes for c in moved), default=0),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        seconds=seconds,
    )


def stored(step: shardfn.ShardedStep[..., Any], state: Any) -> Any:
    """How `step` stores each leaf; whole, where it pads, which `jit` cannot."""

    def sharding(leaf: Any, found: NamedSharding) -> NamedSharding:
        fits = len(found.spec) <= len(leaf.shape) and not any(
            name is not None and size % step.mesh.size
            for size, name in zip(leaf.shape, found.spec, strict=False)
        )
        return found if fits else NamedSharding(step.mesh, PartitionSpec())

    return jax.tree.map(sharding, state, step.shardings(state))


def jitted(
    fn: Callable[..., Any],
    step: shardfn.ShardedStep[..., Any],
    args: tuple[Any, ...],
    batch_spec: Any = ROWS,
    returned: int | None = 0,
) -> jax.stages.Lowered:
    """`fn` under `jit`, unedited, its state stored as `step` stores it.

    Args:
      fn: the plain step, the state first.
      step: the same through `fully_shard`.
      args: arguments as shapes.
      batch_spec: for all arguments but the state, or a tuple with a prefix of each.
      returned: the argument whose next value is the first of two results, stored like
        it and donated; None if none comes back.

    Returns:
      The lowered program.
    """
    mesh, others = step.mesh, args[1:]
    specs = batch_spec if type(batch_spec) is tuple else (batch_spec,) * len(others)

    def split(spec: PartitionSpec, tree: Any) -> Any:
        return jax.tree.map(lambda x: NamedSharding(mesh, spec), tree)

    batch = (
        jax.tree.map(split, *pair, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for pair in zip(specs, others, strict=True)
    )
    shardings = (stored(step, args[0]), *batch)
    run = jax.jit(
        fn,
        in_shardings=shardings,
        out_shardings=None if returned is None else (shardings[returned], None),
        donate_argnums=() if returned is None else returned,
    )
    return run.lower(*args)
