"""What the gallery knows of one program, and what one run of it says.

In: a program, and the path of its source. Out: a row of the table in README.md.
"""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from sources import SourceError, load

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives, wire_bytes
from shardfn.testing import assert_parity
from shardfn.testing.parity import assert_same

STEPS, TARGET = 3, "h100:8"


class Made(NamedTuple):
    """Arguments of tiny sizes: `args` of the adapted step, and what adapters bind."""

    args: tuple[Any, ...]
    bound: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A training step that somebody else wrote.

    Attributes:
      repository: on GitHub.
      file: the file in it that defines the step.
      make: makes arguments, as the program's own main function does.
      adapter: from the file's module and what it binds to what `fully_shard` takes.
      axis: what the step calls the axis of the batch.
      tol: largest relative difference of a leaf.
      options: of `fully_shard`.
      own: from the module and its arguments to the step as the program itself shards
        it over all devices, where `jax.pmap` does not.
      python: the oldest that its sources run on.
    """

    repository: str
    file: str
    make: Callable[[Any], Made]
    adapter: Callable[[Any, dict[str, Any]], Callable[..., Any]]
    axis: str = "data"
    tol: float = 1e-5
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    own: Callable[[Any, Made], jax.stages.Lowered] | None = None
    python: tuple[int, int] = (3, 11)

    @property
    def is_mapped(self) -> bool:
        """Whether the step calls collectives, as under `jax.pmap`."""
        return self.axis != "data"

    @property
    def lines(self) -> int:
        """Lines of the adapter, without its `def`; none where the step is taken as it
        is."""
        body = [
            line.split("#")[0].strip()
            for line in inspect.getsource(self.adapter).splitlines()[1:]
        ]
        kept = [line for line in body if line]
        is_given = len(kept) == 1 and "(" not in kept[0]
        return 0 if is_given else len(kept)


class Row(NamedTuple):
    """What was found: sizes in bytes."""

    name: str
    source: str
    lines: int
    leaves: int
    state: int
    per_device: int
    wire: int
    parameters: int
    own: float | None
    compiled: str

    def sent(self, wire: float) -> str:
        """In M, the bytes of the gathered parameters; in bytes where all of them stay,
        as activations are smaller."""
        if not self.parameters:
            return f"{wire / 1e3:.0f} kB"
        return f"{wire / self.parameters:.2f} M"

    def __str__(self) -> str:
        part = f"{self.per_device / 1e3:.0f} of {self.state / 1e3:.0f} kB"
        own = "-" if self.own is None else self.sent(self.own)
        sent = self.sent(self.wire) + ("" if self.parameters else ", weights stay")
        return (
            f"| {self.name} | {self.source} | {self.lines} | equal, {self.leaves} "
            f"leaves | {part} | {sent} | {own} | {self.compiled} |"
        )


def run(name: str, program: Program, root: Path, target: str = TARGET) -> Row:
    """Compares every leaf of three steps with the plain step, on all devices; none is
    compiled for if `target` is empty."""
    if sys.version_info < program.python:
        needed = ".".join(map(str, program.python))
        raise SourceError(f"{program.file} needs Python {needed}.")
    module = load(root, program.file)
    made = program.make(module)
    step = program.adapter(module, made.bound)
    mesh = jax.make_mesh((jax.device_count(),), (program.axis,))
    options = {"axis": program.axis, "min_size": 0, **program.options}
    sharded = shardfn.fully_shard(step, mesh, **options)
    if program.is_mapped:
        compare_with_pmap(step, program, sharded, *made.args)
    else:
        assert_parity(step, mesh, *made.args, steps=STEPS, tol=program.tol, **options)
    pure, args, _ = sharded.as_pure(made.args, {})
    plan = pure.plan(*args)
    states = [args[i] for i in pure.meaning_of(*args).arguments if isinstance(i, int)]
    stored = jax.tree.leaves([pure.shard(x) for x in states])
    arrays = [x for x in stored if isinstance(x, jax.Array)]
    return Row(
        name,
        f"{program.repository}@{commit(root)} {program.file}",
        program.lines,
        len(arrays),
        sum(x.nbytes for x in jax.tree.leaves(states) if hasattr(x, "nbytes")),
        sum(x.addressable_shards[0].data.nbytes for x in arrays),
        plan.wire_bytes,
        plan.parameter_bytes,
        sent_by_its_own(step, program, module, made),
        compiled_for(target, pure, args),
    )


def sent_by_its_own(
    step: Any, program: Program, module: Any, made: Made
) -> float | None:
    """Bytes that each device sends as the program itself shards it."""
    if program.own is not None:
        lowered = program.own(module, made)
    elif program.is_mapped:
        state, batch = made.args
        mapped = jax.pmap(step, program.axis, in_axes=(None, 0))
        lowered = mapped.lower(state, in_rows(batch))
    else:
        return None
    found = read_collectives(lowered.compile().as_text() or "")
    return wire_bytes([c for c in found if c.group_size > 1])


def compiled_for(target: str, step: Any, args: tuple[Any, ...]) -> str:
    """What the target's compiler makes of it: whether all is as planned, and what one
    device takes."""
    if not target or targets.missing(target):
        return "not asked"
    report = step.on(target, *args)
    wrong = sum(not line.ok for line in report.verification.lines)
    lines = len(report.verification.lines)
    found = f"{wrong} of {lines} lines differ" if wrong else "as planned"
    found = found if report.verification.ok or wrong else "more than planned"
    return f"{found}, {report.memory.peak / 2**20:.1f} MiB"


def in_rows(batch: Any) -> Any:
    """A batch for `jax.pmap`, a part of it for each device."""
    count = jax.device_count()
    return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)


def compare_with_pmap(
    step: Any, program: Program, sharded: Any, state: Any, batch: Any
) -> None:
    """Compares every result of every step with `jax.pmap` of it, the state whole on
    each device."""
    plain = jax.pmap(step, program.axis, in_axes=(None, 0))
    rows = in_rows(batch)
    stored = sharded.shard(state)
    for number in range(1, STEPS + 1):
        # One after the other: programs that run at once starve one another of threads.
        new, *each = jax.block_until_ready(plain(state, rows))
        state = jax.tree.map(lambda x: x[0], new)
        stored, *got = sharded(stored, batch)
        # What is the same on all devices is one value; what is not, has their rows.
        expected = jax.tree.map(
            lambda x, y: x[0] if x[0].shape == y.shape else x.reshape(y.shape),
            *(each, got),
        )
        where = f"{program.file}, step {number}"
        assert_same(expected, got, f"{where}, results", tol=program.tol)
        whole = sharded.unshard(stored)
        assert_same(
            *(state, whole, f"{where}, state"), tol=program.tol, weak_types=False
        )


def commit(root: Path) -> str:
    """The commit of a checkout; `COMMIT` in a folder without git."""
    if (root / "COMMIT").is_file():
        return (root / "COMMIT").read_text().strip()[:7]
    asked = ["git", "-C", str(root), "rev-parse", "--short=7", "HEAD"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
