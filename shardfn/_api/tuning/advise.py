"""Which options may help a step, by the figures of its compiled program.

In: what a step takes on a target. Out: a row of `Advice` per option that may save time
there, or memory if it lacks, the most first. A row is a bound: tuning compiles it to
know.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from shardfn._api.stored_dimensions import stored_by_use
from shardfn._api.tuning.replica_rows import replica_rows
from shardfn._core.device_coords import slices_of
from shardfn._core.limits import JOINED_BYTES
from shardfn._core.moves import AllGather, ReduceScatter
from shardfn._core.option_values import AUTO, FIRST, layers_ahead
from shardfn._core.phases import BACKWARD, FORWARD
from shardfn._lowering.choose_dimensions import StoredByUse
from shardfn._lowering.option_table import NETWORK_FLAG, NOT_DELAYED, ONE_LATENCY
from shardfn._lowering.xla_options import set_elsewhere, tried
from shardfn._schedule.loop_invariants import ALL_FIT, FITS, SMALL
from shardfn._schedule.share_gathers import FEW_KEPT, NEAR
from shardfn.analysis._figures import Figures
from shardfn.analysis._gpus import GPUS
from shardfn.analysis._text import seconds_text
from shardfn.analysis.advice import Advice
from shardfn.analysis.collective import Collective

Devices = Sequence[object]

SHARED = frozenset({SMALL, FITS, ALL_FIT, FEW_KEPT, NEAR})
"""Notes of gathers that are whole for longer than one use of them takes."""


def advise(
    figures: Figures,
    devices: Devices,
    memory: int,
    others: Sequence[Advice] = (),
) -> tuple[Advice, ...]:
    """What may help.

    Args:
      figures: of the step, compiled for the target.
      devices: the target's.
      memory: bytes that the step may take on each of them.
      others: changes that the figures do not tell, such as `stored_otherwise`.

    Returns:
      The changes, in the order in which they are worth trying.
    """
    found = [row for rule in RULES for row in rule(figures, devices, memory)]
    found += others
    lacks = figures.memory.peak - memory
    if lacks > 0:
        return tuple(sorted(found, key=lambda row: (row.takes, -row.saves)))
    useful = [row for row in found if row.saves and row.takes <= -lacks]
    return tuple(sorted(useful, key=lambda row: -row.saves))


def stored_otherwise(
    figures: Figures, shard: Mapping[str, Mapping[str, int]], by_use: StoredByUse
) -> list[Advice]:
    """Leaves that are stored on the dimensions that are best for what meets them.

    Args:
      figures: of the step, its state stored as it is now.
      shard: the better dimensions.
      by_use: what they save.

    Returns:
      One row, or none if no dimension is better.
    """
    if not shard:
        return []
    asked = dict(figures.plan.control.given).get("shard")
    option = tuple(stored_by_use(asked, shard).items())
    saves = figures.transfer_seconds * (1 - by_use.then.price / by_use.now.price)
    why = f"as shard_for=(state, batch) does, {by_use.text}"
    return [Advice("leaves stored by their use", option, saves, 0, why)]


def of_storage(figures: Figures) -> list[Advice]:
    """The rows of a report about the dimensions on which leaves are stored."""
    return [row for row in figures.advice if "shard" in dict(row.options)]


def _prefetch(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """Gathers of loops, a layer ahead: those that a layer uses first, or all. Not of
    loops that gather in turn, which costs less (see `order_gathers`)."""
    del devices, memory
    asked, waits = figures.plan.control.asked("prefetch"), _waits(figures, AllGather.op)
    lines = [c for c in _gathers(figures) if _in_loop(c)]
    in_turn = any(why.step.in_turn for c in lines for why in c.why)
    if in_turn or not lines or not waits or any(map(layers_ahead, asked)):
        return
    why = f"the device waits {seconds_text(waits)} for gathers"
    first = [c for c in lines if c.used_first and not c.ahead]
    if first and FIRST not in asked:
        title, size = "first weights of a layer ahead", _most_of_a_phase(first)
        yield Advice(title, (("prefetch", FIRST),), waits, size, why)
    size = _most_of_a_phase(lines)
    yield Advice("a layer ahead", (("prefetch", 1),), waits, size, why)


def _keep_gathered(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """Weights kept between the passes: of all leaves whose second gather is saved, as
    many as fit, those first that wait the longest for each byte."""
    del devices
    waits, control = _waits(figures, AllGather.op), figures.plan.control
    twice = [
        c
        for c in _gathers(figures)
        if c.phase == BACKWARD
        and control.of(c.path).reshard_after_forward is not False
        and any(f.path == c.path for f in _gathers(figures) if f.phase == FORWARD)
    ]
    free, kept = memory - figures.memory.peak, list[Collective]()
    for c in sorted(twice, key=_worth_keeping):
        size = _whole([c]) * c.each
        if size <= free:
            free, kept = free - size, [*kept, c]
    if not kept or not waits:
        return
    sent = sum(c.total_bytes for c in kept)
    share = sent / max(sum(c.total_bytes for c in _gathers(figures)), 1)
    size = sum(_whole([c]) * c.each for c in kept)
    paths = tuple(dict.fromkeys(c.path for c in kept))
    all_are = len(kept) == len(twice)
    of = f"{len(paths)} of {len({c.path for c in twice})} leaves"
    why = f"{of} are gathered twice, {share:.0%} of all gathered bytes"
    title = "weights kept for the backward pass"
    asked = (_of_leaves(figures, "reshard_after_forward", False, paths, all_are),)
    yield Advice(title, asked, min(waits, share * _transfers(figures)), size, why)


def _of_leaves(
    figures: Figures, option: str, value: Any, paths: Iterable[str], may_be_all: bool
) -> tuple[str, Any]:
    """An option with a value for some leaves, or for all if it may be and nothing is
    asked of any; what is asked of the others stays."""
    control = figures.plan.control
    if may_be_all and not control.asked(option):
        return option, value
    each = ((x.name, getattr(control.of(x.name), option)) for x in figures.state)
    asked = {name: given for name, given in each if given != AUTO}
    return option, {**asked, **dict.fromkeys(paths, value)}


def _reshard_after_forward(
    figures: Figures, devices: Devices, memory: int
) -> Iterator[Advice]:
    """Weights that iterations or both passes share, gathered for each where the step
    does not fit."""
    del devices
    control = figures.plan.control
    shared = [
        c
        for c in _gathers(figures)
        if control.of(c.path).reshard_after_forward == AUTO
        and any(note.text in SHARED for why in c.why for note in why.step.notes)
    ]
    if shared and figures.memory.peak > memory:
        paths = tuple(dict.fromkeys(c.path for c in shared))
        why = f"{len(paths)} leaves are whole in several iterations, or in both passes"
        asked = (_of_leaves(figures, "reshard_after_forward", True, paths, True),)
        yield Advice("weights gathered again", asked, 0.0, -_whole(shared), why)


def _defer(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """Gradients of microbatches that are summed over devices once."""
    del devices, memory
    sizes = {leaf.name: leaf for leaf in figures.state}
    summed: Counter[str] = Counter()
    for c in figures.plan.collectives:
        if c.op == ReduceScatter.op and c.path in sizes:
            summed[c.path] += c.elements * c.each
    elements = {name: _elements(sizes[name].shape) for name in summed}
    many = [name for name, n in summed.items() if n >= 2 * elements[name] > 0]
    waits = _waits(figures, ReduceScatter.op)
    if many and waits and "defer" not in figures.plan.control.asked("accumulate"):
        whole = sum(sizes[x].bytes for x in many) * figures.plan.axes.devices
        most = max(summed[name] / elements[name] for name in many)
        why = f"gradients of {len(many)} leaves are summed {most:.3g} times a step"
        asked = (("accumulate", "defer"),)
        yield Advice("gradients summed once", asked, waits, whole, why)


def _buckets(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """Small leaves that move together."""
    del devices, memory
    small = [c for c in figures.plan.collectives if 0 < c.wire_bytes < JOINED_BYTES]
    runs, of_all = (
        sum(c.each for c in lines) for lines in (small, figures.plan.collectives)
    )
    latency = figures.timeline.latency * runs / max(of_all, 1)
    saves = min(figures.exposed_seconds, latency)
    if len(small) > 1 and saves and not any(figures.plan.control.asked("bucket_bytes")):
        why = f"{runs} of {of_all} transfers send less than {JOINED_BYTES >> 20} MiB"
        asked = (("bucket_bytes", JOINED_BYTES),)
        yield Advice("small leaves together", asked, saves, 0, why)


def _flags(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """What the compiler can be asked."""
    gathers = _waits(figures, AllGather.op)
    both = _waits(figures, AllGather.op, ReduceScatter.op)
    for name, saves, frees in (
        ("gathers pipelined by XLA", gathers, False),
        ("eight transfers in flight", both, False),
        (ONE_LATENCY, both, False),
        ("gathers pipelined over ICI", gathers, False),
        ("layer scheduler", both, False),
        (NOT_DELAYED, 0.0, True),
    ):
        if not (saves or (frees and figures.memory.peak > memory)):
            continue
        given = tried(devices, name)
        if given.items() - dict(figures.compiler_options).items():
            delayed = _delayed_gradients(figures) if frees else 0
            why = f"the device waits {seconds_text(saves)} for transfers"
            if frees:
                why = "gradients of a layer do not wait for the next layer"
            yield Advice(name, (("compiler_options", given),), saves, -delayed, why)


def _latencies(figures: Figures, devices: Devices, memory: int) -> Iterator[Advice]:
    """What XLA's scheduler goes by."""
    del memory
    both = AllGather.op, ReduceScatter.op
    waits = _waits(figures, *both)
    # It orders what an iteration does, and takes nothing out of it.
    rest = figures.exposed_seconds - figures.timeline.exposed_in_any_order
    saves = min(waits, rest)
    if saves and figures.target.platform == "cuda" and figures.latencies == "xla":
        asked = (("latencies", "predicted"),)
        why = f"the device waits {seconds_text(waits)}, which XLA's figures do not tell"
        why += _of_network(figures, devices)
        yield Advice("latencies predicted", asked, saves, 0, why)


def _of_network(figures: Figures, devices: Devices) -> str:
    """What tells XLA the network's rate alone, where it takes less than the machine's;
    only the environment can."""
    gpu = GPUS.get(figures.target.name.partition(":")[0])
    taken, there = gpu and gpu.xla_network, figures.target.network_bandwidth
    if taken is None or taken >= there or slices_of(devices) < 2:
        return ""
    if NETWORK_FLAG in set_elsewhere():
        return ""
    return (
        f". It takes {taken / 1e9:g} GB/s of network; "
        f"XLA_FLAGS=--{NETWORK_FLAG}=nic_speed_gbps={there / 1e9:g} "
        "tells it more, and compiles once"
    )


RULES: tuple[Callable[[Figures, Devices, int], Iterator[Advice]], ...] = (
    replica_rows,
    _prefetch,
    _keep_gathered,
    _reshard_after_forward,
    _defer,
    _buckets,
    _latencies,
    _flags,
)
"""What may help, each with the figures that say so."""


def _worth_keeping(line: Collective) -> tuple[float, int, str]:
    """First what sends most for each byte that is kept, of these the largest."""
    size = max(_whole([line]), 1)
    return -line.wire_bytes / size, -size * line.each, line.path


def _waits(figures: Figures, *ops: str) -> float:
    return sum(figures.timeline.exposed_by_op.get(op, 0.0) for op in ops)


def _transfers(figures: Figures) -> float:
    return figures.transfer_seconds


def _gathers(figures: Figures) -> list[Collective]:
    """The gathers of leaves of the state."""
    found = figures.plan.collectives
    return [c for c in found if c.op == AllGather.op and c.path and not c.parts]


def _in_loop(line: Collective) -> bool:
    return line.times is None or line.times > 1


def _most_of_a_phase(lines: Sequence[Collective]) -> int:
    """Bytes of what is gathered, each time, in the phase that gathers most."""
    phases = {line.phase for line in lines}
    return max(_whole(c for c in lines if c.phase == phase) for phase in phases)


def _whole(lines: Sequence[Collective] | Iterator[Collective]) -> int:
    """Bytes of what is gathered, each time, on one device."""
    return sum(c.wire_bytes * c.devices // max(c.devices - 1, 1) for c in lines)


def _delayed_gradients(figures: Figures) -> int:
    """Bytes of the gradients of a layer whose sums wait for the next one."""
    lines = [c for c in figures.plan.collectives if c.op == ReduceScatter.op]
    return _whole(c for c in lines if _in_loop(c) and not c.undelayed)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
