"""Makes a state sharded from birth: no device holds more than its shards and a leaf.

In: a function that makes the leaves as they are stored, and their shardings. Out: the
leaves. They are made by one program if its temporary memory is at most that of the
largest leaf. If not, as with orthogonal weights, each of which a device makes as a
whole, by several programs, one after the other, of which each makes some of the leaves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardfn._core import compat, processes
from shardfn._core.limits import INIT_BYTES

Make = Callable[..., list[jax.Array]]


def make_leaves(
    make: Make, shardings: Sequence[Sharding], sizes: Sequence[int], args: Any
) -> list[jax.Array]:
    """The leaves, each made on the devices that store it.

    Args:
      make: pure function of `args` that returns the leaves as they are stored.
      shardings: of the leaves.
      sizes: bytes of each leaf when it is whole.
      args: the arguments.

    Returns:
      The leaves.
    """
    if any(map(compat.is_traced, jax.tree.leaves(args))) or compat.is_tracing():
        return jax.jit(make, out_shardings=list(shardings))(*args)
    args, made = _on_devices(args, shardings), {}
    # One program makes leaves on the same devices.
    group = processes.of(shardings[0].device_set if shardings else ())
    compiled = programs(make, shardings, sizes, args)
    while True:
        with processes.meeting("compiled what makes the state", group):
            chosen, program = next(compiled, ([], None))
        if program is None:
            break
        made.update(zip(chosen, program(*args), strict=True))
        if len(made) < len(shardings):
            jax.block_until_ready(list(made.values()))
    return [made[i] for i in range(len(shardings))]


def _on_devices(args: Any, shardings: Sequence[Sharding]) -> Any:
    """`args`, on every device that takes part: moved there as the caller's own, so that
    `jax.transfer_guard` has no objection."""
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) != 1:
        return args
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())
    return jax.tree.map(
        lambda x: compat.put(x, everywhere) if isinstance(x, jax.Array) else x, args
    )


def programs(
    make: Make, shardings: Sequence[Sharding], sizes: Sequence[int], args: Any
) -> Iterator[tuple[list[int], jax.stages.Compiled]]:
    """Compiled programs that make the leaves together, and which ones each makes; the
    arguments may be abstract. See `make_leaves`."""
    allowed = max(INIT_BYTES, *sizes, 1)

    def some(chosen: list[int]) -> Iterator[tuple[list[int], jax.stages.Compiled]]:
        def part(*args: Any) -> list[jax.Array]:
            leaves = make(*args)
            return [leaves[i] for i in chosen]

        chosen_shardings = [shardings[i] for i in chosen]
        program = jax.jit(part, out_shardings=chosen_shardings).lower(*args).compile()
        count = min(math.ceil(_temporary(program) / allowed), len(chosen))
        if count <= 1:
            yield chosen, program
            return
        for group in _groups(chosen, sizes, count):
            yield from some(group)

    yield from some(list(range(len(shardings))))


def _temporary(program: jax.stages.Compiled) -> int:
    """Bytes that a device needs besides the results; 0 if that is not known."""
    return getattr(program.memory_analysis(), "temp_size_in_bytes", 0)


def _groups(chosen: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Cuts a list of leaves into at most `count` lists of about the same bytes, and at
    least two: a leaf belongs where its middle lies."""
    total, before = sum(sizes[i] + 1 for i in chosen), 0
    groups: list[list[int]] = [[] for _ in range(count)]
    for i in chosen:
        size = sizes[i] + 1
        groups[(2 * before + size) * count // (2 * total)].append(i)
        before += size
    return [group for group in groups if group]
