"""From a jaxpr to a `Program`: calls inlined, equal equations merged.

In: a closed jaxpr. Out: a `Program` without dead equations, control flow with its own.

Calls are inlined as XLA inlines them: two gathers of one parameter, one in each call,
would be merged behind the plan's back.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import Literal

from shardfn._core import compat
from shardfn._core.equation_key import equation_key
from shardfn._core.op_sharding_rule import OpShardingRule
from shardfn._core.program import ZERO, Atom, Node, Program, live
from shardfn._core.rule_registry import is_registered, rule_of
from shardfn._trace.dim_marks import Marking, Marks, has_rows, marks_of
from shardfn._trace.iota_indexing import Counting, Counts
from shardfn._trace.literal_values import Zeros, is_empty, made_whole_apart, zeros_like
from shardfn._trace.node_kinds import kind_of, may_merge
from shardfn._trace.passes import Argument, mark_passes
from shardfn._trace.platform_branches import branch_on
from shardfn._trace.row_joins import cuts_alike, joins_alike
from shardfn._trace.row_shifts import Pieces
from shardfn._trace.row_windows import Windows, cuts_most
from shardfn._trace.shared_terms import SharedTerms
from shardfn._trace.unordered import Unordered


def make_program(
    closed_jaxpr: Any,
    arguments: Sequence[Argument] = (),
    known: Program | None = None,
    devices: int = 1,
    platform: str = "",
) -> Program:
    """Numbers the values of a closed jaxpr; see the module's first lines.

    Args:
      closed_jaxpr: the jaxpr.
      arguments: what its arguments are.
      known: its `unmarked_program`, if that was made before.
      devices: how many may split the rows of the batch.
      platform: that of the devices, which runs one of some branches; "" for all.

    Returns:
      The program, its nodes marked with their passes.
    """
    given = tuple(argument.marks for argument in arguments)
    if known is None or _matters(given, closed_jaxpr, devices):
        known = unmarked_program(closed_jaxpr, platform, given, devices)
    return mark_passes(known, arguments)


def unmarked_program(
    closed: Any, platform: str = "", given: tuple[Marks, ...] = (), devices: int = 1
) -> Program:
    """The same, not marked; `given` is what lies along the dimensions of arguments."""
    live_jaxpr = compat.without_dead_code(closed)
    return _Builder(devices, platform).build(live_jaxpr, None, given)


def _matters(given: Sequence[Marks], closed: Any, devices: int) -> bool:
    """Whether the program of a jaxpr depends on what its arguments are."""
    return any(map(has_rows, given)) and cuts_most(closed, devices)


@dataclass
class _Builder:
    """What is shared while one jaxpr and the jaxprs in it become programs."""

    devices: int = 1
    platform: str = ""
    cache: dict[Hashable, Program] = field(default_factory=dict)
    marking: Marking = field(default_factory=Marking)
    keep_alive: list[Any] = field(default_factory=list)
    known: dict[Hashable, tuple[Any, ...]] = field(default_factory=dict)
    rules: dict[int, OpShardingRule | None] = field(default_factory=dict)

    def build(
        self,
        closed: Any,
        call: Any,
        given: tuple[Marks, ...] = (),
        counting: Counting = (),
    ) -> Program:
        """The program of a jaxpr that `call` runs. `given` says what lies along the
        dimensions of its arguments, if that matters, and `counting` along which of them
        an argument counts."""
        given = given if _matters(given, closed, self.devices) else ()
        key = id(closed), given, counting
        if key not in self.cache:
            self.keep_alive.append(closed)
            self.cache[key] = _Values(self).run(closed, call, given, counting)
        return self.cache[key]

    def eqn_key(
        self, eqn: Any, operands: Sequence[Atom]
    ) -> tuple[tuple[Any, ...], bool]:
        """`equation_key(eqn, operands)`, the same object for all that are equal."""
        eqn_key, comparable = equation_key(eqn, operands)
        if comparable:
            eqn_key = self.known.setdefault(eqn_key, eqn_key)
        return eqn_key, comparable

    def rule(self, eqn: Any, eqn_key: tuple[Any, ...]) -> OpShardingRule | None:
        """The rule of `eqn`, the same object for equal equations."""
        if id(eqn_key) not in self.rules:
            self.rules[id(eqn_key)] = rule_of(eqn)
            self.keep_alive.append(eqn_key)
        return self.rules[id(eqn_key)]


@dataclass
class _Values:
    """The values and nodes of one program while it is built.

    Equations on equal operands are merged, except those on literals alone: what they
    make can be made in any sharding, and consumers that prefer different ones should
    not share it. `same` maps such a value to the first one equal to it.
    """

    builder: _Builder
    avals: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    seen: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    zeros: Zeros = field(default_factory=Zeros)
    same: dict[int, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    pieces: Pieces = field(default_factory=Pieces)
    unordered: Unordered = field(default_factory=Unordered)
    shared: SharedTerms = field(default_factory=SharedTerms)
    windows: Windows | None = None

    def run(
        self, closed: Any, call: Any, given: tuple[Marks, ...], counting: Counting
    ) -> Program:
        inputs = tuple(self.new(v.aval) for v in compat.open_jaxpr(closed)[0].invars)
        self.counts.entering(inputs, counting)
        if given:
            marks = dict(zip(inputs, given, strict=True))
            self.windows = Windows(self.pieces, marks, self.builder.devices)
        outputs = self.inline(closed, inputs, (), call)
        outputs = tuple(
            a if a in inputs else self.with_elements(a, call) for a in outputs
        )
        nodes, constants = live(self.nodes, self.constants, outputs)
        nodes = tuple(made_whole_apart(nodes, outputs, self.new, self.avals))
        nodes, constants = live(nodes, constants, outputs)
        return Program(
            avals=tuple(self.avals),
            inputs=inputs,
            constants=constants,
            nodes=nodes,
            outputs=outputs,
        )

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        self.pieces.value(len(self.avals) - 1, aval)
        return len(self.avals) - 1

    def inline(
        self, closed: Any, inputs: Sequence[Atom], around: tuple[str, ...], call: Any
    ) -> tuple[Atom, ...]:
        """Adds the equations of a jaxpr that the equation `call` runs, if any does;
        `around` are the derivatives that this is part of."""
        jaxpr, consts = compat.open_jaxpr(closed)
        env: dict[Any, Atom] = {}

        def read(atom: Any) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = value = self.new(var.aval)
            if self.windows is not None:
                self.windows.constant(value, const)
            const = compat.untyped_array(const)
            self.constants.append((value, const))
            self.counts.constant(value, const)
        env.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            eqn = compat.with_line_of(eqn, call) if call is not None else eqn
            eqn = compat.untyped_equation(eqn)
            operands = tuple(self.with_elements(read(v), eqn) for v in eqn.invars)
            made_for = (*around, *compat.derivatives(eqn))
            taken_out = self.shared.taken_out(eqn, operands, self.avals)
            body = compat.inlined_body(eqn) or self.written_out(eqn)
            rewritten = self.rewritten(eqn, operands) if body is None else None
            if taken_out is not None:
                results = self.inline(*taken_out, made_for, eqn)
            elif body is not None:
                body = compat.close_jaxpr(body)
                results = self.inline(body, operands, made_for, eqn)
            elif rewritten is not None:
                results = self.inline(*rewritten, made_for, eqn)
                self.note_join(eqn, operands, results)
            else:
                results = self.add(eqn, operands, made_for)
            self.shared.equation(eqn, operands, results)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(read, jaxpr.outvars))

    def with_elements(self, atom: Atom, reader: Any) -> Atom:
        """An operand; zeros of its own in place of one that has no elements."""
        if not isinstance(atom, int) or not is_empty(self.avals[atom]):
            return atom
        if atom not in self.zeros.known:
            (atom,) = self.inline(zeros_like(self.avals[atom]), (), (), reader)
        return atom

    def written_out(self, eqn: Any) -> Any | None:
        """What an operation without rules stands for, if it is written in others."""
        if kind_of(eqn)[0] != "op" or is_registered(eqn.primitive):
            return None
        return compat.traced_lowering(eqn)

    def rewritten(
        self, eqn: Any, operands: Sequence[Atom]
    ) -> tuple[Any, tuple[Atom, ...]] | None:
        """A jaxpr in place of `eqn`, in a form that can be split, and its operands."""
        zeros = [self.zeros.kind(atom) == ZERO for atom in operands]
        return (
            branch_on(eqn, operands, self.builder.platform)
            or self.zeros.selected(eqn, operands)
            or self.counts.batched(eqn, operands)
            or self.pieces.shifted(eqn, operands, zeros)
            or self.on_all_rows(eqn, operands, zeros)
            or self.unordered.ordered_no_more(eqn, operands)
        )

    def note_join(self, eqn: Any, operands: Any, results: Sequence[Atom]) -> None:
        """Notes of what a join or a cut that has been rewritten is made."""
        values = [atom for atom in results if isinstance(atom, int)]
        if cuts_alike(eqn) and len(values) == len(results):
            self.pieces.equation(eqn, operands, values)
        if self.windows is not None and joins_alike(eqn) and values:
            zeros = [self.zeros.kind(atom) == ZERO for atom in operands]
            self.windows.joins(eqn, operands, values, None, zeros)

    def on_all_rows(
        self, eqn: Any, operands: Sequence[Atom], zeros: Sequence[bool]
    ) -> tuple[Any, tuple[Atom, ...]] | None:
        if self.windows is None:
            return None
        eqn_key, _ = self.builder.eqn_key(eqn, operands)
        rule = self.builder.rule(eqn, eqn_key)
        return self.windows.on_all_rows(eqn, operands, rule, zeros)

    def add(
        self, eqn: Any, operands: tuple[Atom, ...], derivatives: tuple[str, ...]
    ) -> tuple[int, ...]:
        eqn_key, comparable = self.builder.eqn_key(eqn, operands)
        key = None
        if comparable and may_merge(eqn):
            key = (
                id(eqn_key),
                *(self.same.get(a, a) for a in operands if isinstance(a, int)),
            )
        equal = self.seen.get(key) if key is not None else None
        if equal is not None and any(isinstance(atom, int) for atom in operands):
            return equal
        kind, jaxprs, layout = kind_of(eqn)
        counting = [self.counts.inside(region, operands) for region in layout]
        bodies = tuple(
            self.builder.build(jaxpr, eqn, counting=counts)
            for jaxpr, counts in zip(jaxprs, counting, strict=True)
        )
        outputs = tuple(self.new(v.aval) for v in eqn.outvars)
        rule = self.builder.rule(eqn, eqn_key) if kind == "op" else None
        node = Node(
            eqn=eqn,
            inputs=operands,
            outputs=outputs,
            derivatives=derivatives,
            kind=kind,
            bodies=bodies,
            regions=layout,
            rule=rule,
            kinds=tuple(map(self.zeros.kind, operands)),
            eqn_key=eqn_key,
        )
        self.nodes.append(self.marked(node, jaxprs))
        self.zeros.equation(eqn, operands, outputs)
        if len(outputs) == 1:
            self.counts.equation(eqn, operands, outputs[0])
            self.unordered.equation(eqn, operands, outputs[0], rule)
        self.pieces.equation(eqn, operands, outputs)
        if equal is not None:
            self.same.update(zip(outputs, equal, strict=True))
        elif key is not None:
            self.seen[key] = outputs
        return outputs

    def marked(self, node: Node, jaxprs: Sequence[Any]) -> Node:
        """A new node whose bodies are of these jaxprs; notes what lies along the
        dimensions of what it makes."""
        if self.windows is None:
            return node
        marking, marks = self.builder.marking, self.windows.marks
        operands = marks_of(self, node, marks)
        if node.bodies:
            given = marking.entering(node, operands)
            bodies = zip(jaxprs, given, node.regions, strict=True)
            built = (
                self.builder.build(
                    b, node.eqn, tuple(m), self.counts.inside(region, node.inputs)
                )
                for b, m, region in bodies
            )
            node = replace(node, bodies=tuple(built))
        made = marking.results(self, node, operands)
        marks.update(zip(node.outputs, made, strict=True))
        zeros = [kind == ZERO for kind in node.kinds]
        self.windows.equation(node.eqn, node.inputs, node.outputs, node.rule, zeros)
        return node
