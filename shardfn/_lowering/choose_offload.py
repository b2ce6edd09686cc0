"""Which leaves of a state leave for the host's memory, so that a step fits.

In: a step planned with them in the device's memory, and the bytes that it may take.
Out: a choice that copies few bytes over the host's link: what only the update reads
goes first, leaf by leaf, and no more of it than has to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardfn._core.offloading import (
    MASTERS,
    MOMENTS,
    PARAMETERS,
    ROLES,
    OffloadChoice,
    OffloadGroup,
)
from shardfn._core.phases import UPDATE, Pass
from shardfn._core.plan import Apply, BodyPlan, Step, reads
from shardfn._core.program import Node, Program, number_of
from shardfn._core.sharding import Axes
from shardfn._core.sizes import local_bytes
from shardfn._lowering.planned_program import Planned
from shardfn._schedule.heap import Heap
from shardfn._schedule.host_transfers import host_transfers
from shardfn._schedule.peak_bytes import peak_bytes

Bytes = Mapping[int, int]
"""Of leaves of the state, by position, the bytes that a device stores."""


def choose_offload(
    planned: Planned,
    names: Sequence[str],
    able: Sequence[int],
    asked: str,
    bound: int,
    heap: Heap,
    correction: int = 0,
) -> OffloadChoice:
    """The leaves that go to the host.

    Args:
      planned: the step, with those in the device's memory that are to be chosen from.
      names: of all leaves of the state.
      able: the positions of those to be chosen from.
      asked: as the user wrote it.
      bound: bytes that the step may take of each device.
      heap: how the compiler uses memory.
      correction: bytes that it takes beyond the plan's estimate.

    Returns:
      The choice; of one that does not fit, with all leaves on the host.
    """
    program, axes = planned.program, planned.axes
    plain = replace(planned.body, host=None)

    def taken(on_host: frozenset[int]) -> int:
        body = _with_host_leaves(program, plain, on_host | planned.body.on_host, axes)
        return peak_bytes(program, body, axes, heap) + correction

    without = taken(frozenset())
    roles = _roles(planned, able)
    sizes = {
        i: local_bytes(program.avals[program.inputs[i]], planned.stored[i], axes)
        for i in able
    }
    chosen: frozenset[int] = frozenset()
    now = without
    for role in ROLES:
        of_role = {i: sizes[i] for i in able if roles[i] == role}
        chosen, now = _enough(of_role, chosen, now, bound, taken)
    return OffloadChoice(
        asked,
        bound,
        without,
        now,
        tuple(
            OffloadGroup(
                role,
                {names[i]: sizes[i] for i in able if roles[i] == role},
                frozenset(names[i] for i in chosen if roles[i] == role),
            )
            for role in ROLES
        ),
        correction,
        heap.holes,
    )


def _with_host_leaves(
    program: Program, body: BodyPlan, leaves: frozenset[int], axes: Axes
) -> BodyPlan:
    """A plan with these arguments in the host's memory, and the copies of them."""
    body = replace(body, on_host=leaves, to_host=leaves, host=None)
    return host_transfers(program, body, axes)


def _enough(
    sizes: Bytes,
    chosen: frozenset[int],
    now: int,
    bound: int,
    taken: Callable[[frozenset[int]], int],
) -> tuple[frozenset[int], int]:
    """`chosen` with as many leaves more as make a step fit, or all of them, and what it
    takes then. Plans say what a choice frees, bytes only what to try."""
    mine, before = set[int](), now
    while now > bound and len(mine) < len(sizes):
        left = {i: size for i, size in sizes.items() if i not in mine}
        mine.update(_covering(left, now - bound))
        now = taken(chosen | mine)
    if now > bound and now >= before:  # whole copies of them take as much
        return chosen, before
    for i in sorted(mine, key=lambda i: -sizes[i]):
        if sizes[i] <= bound - now:
            without = taken(chosen | mine - {i})
            if without <= bound:
                mine.remove(i)
                now = without
    return chosen | mine, now


def _covering(sizes: Bytes, need: int) -> Iterator[int]:
    """Leaves of at least `need` bytes together, or all, few of them more than needed:
    the largest as long as none is enough, then the smallest that is."""
    left = dict(sizes)
    while left and need > 0:
        enough = [i for i, size in left.items() if size >= need]
        best = min if enough else max
        i = best(enough or left, key=left.__getitem__)
        need -= left.pop(i)
        yield i


def _roles(planned: Planned, able: Sequence[int]) -> dict[int, str]:
    """What leaves are to a step: what other passes than the update read is a parameter;
    of the others, what a parameter is a copy of in another dtype is a master weight."""
    program = planned.program
    used = {
        ref.value
        for step in planned.body.steps
        for ref in reads(step)
        if _pass_of(program, step).phase != UPDATE
    }
    made = {v: node for node in program.nodes for v in node.outputs}
    of_state = enumerate(program.outputs[: len(planned.state)])
    copied = {i: _copied(program, made, number_of(value)) for i, value in of_state}

    def role(leaf: int) -> str:
        if program.inputs[leaf] in used:
            return PARAMETERS
        value = number_of(program.outputs[leaf])
        others = (v for i, v in copied.items() if i != leaf)
        return MASTERS if value in others else MOMENTS

    return {i: role(i) for i in able}


def _pass_of(program: Program, step: Step) -> Pass:
    if isinstance(step, Apply):
        return program.nodes[step.node].during
    return step.during


def _copied(program: Program, made: Mapping[int, Node], value: int) -> int | None:
    """The value that another one is a copy of in another dtype, if it is one."""
    node = made.get(value)
    if node is None or node.kind != "op" or node.rule is None or len(node.inputs) != 1:
        return None
    (given,) = node.inputs
    if not isinstance(given, int) or not node.rule.flat:
        return None
    alike = program.avals[given].dtype == program.avals[value].dtype
    return None if alike else given
