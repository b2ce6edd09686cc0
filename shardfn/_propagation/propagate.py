"""The shardings of a program's values, and of those in the bodies of its control flow.

In: a traced step, the shardings of its arguments, and those that its results must have.
Out: its plan, before any schedule pass. Touches no arrays.

Each program is solved in rounds (`rounds`), in which those of its control flow are.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardfn._core.control import NOTHING_ASKED, Control
from shardfn._core.leaves import Names
from shardfn._core.plan import BodyPlan
from shardfn._core.program import Program
from shardfn._core.residual import feed_back_p
from shardfn._core.sharding import Axes, Sharding, Split
from shardfn._propagation.backward import Memo
from shardfn._propagation.decide_node import Decider
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import Solved
from shardfn._propagation.free_values import free_values
from shardfn._propagation.preferences import Preferences
from shardfn._propagation.rounds import Rounds
from shardfn._propagation.stationary import is_stationary, least_sources


@dataclass(slots=True)
class Known:
    """What plans of one program share, however its arguments are stored, if all else
    that they are asked is the same: most of two such plans is.

    Attributes:
      ops: by equation, and by what is around it, what was decided.
      bodies: plans of control flow's bodies, by what `Solver.solve` is given.
      backward: what backward passes share; it knows decisions by their `id`.
      free: by program, see `free_in`.
    """

    ops: dict[Hashable, Decision] = field(default_factory=dict)
    bodies: dict[Hashable, Solved] = field(default_factory=dict)
    backward: Memo = field(default_factory=Memo)
    free: dict[int, frozenset[int]] = field(default_factory=dict)

    def free_in(self, program: Program) -> frozenset[int]:
        """The values of a program that are made of scalars and constants alone."""
        if id(program) not in self.free:
            self.free[id(program)] = free_values(program)
        return self.free[id(program)]


@dataclass(slots=True)
class Solver:
    """Solves the bodies of one traced step.

    Attributes:
      axes: the mesh axes.
      small: unreduced values with fewer elements are reduced as late as possible: they
        cost latency, not bytes.
      control: which sums of loops to leave unreduced until after them.
      whole: whether small sums behind stationary leaves are all-reduced.
      exchange: whether rows of the batch are exchanged where an op sends less so.
      fed: by leaf, the mesh axis along which gradients stay terms for a residual.
      known: what was decided before.
    """

    axes: Axes
    small: int
    control: Control
    whole: bool = False
    exchange: bool = True
    fed: Mapping[Names, int] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def solve(
        self,
        program: Program,
        inputs: Sequence[Sharding],
        required: Sequence[Sharding | None],
        preferences: Sequence[Preferences],
        may_stay_unreduced: Sequence[frozenset[int]],
        shared: Sequence[int],
        is_kept: bool = True,
    ) -> Solved:
        """Plans one program.

        Args:
          program: the step, or a body of its control flow.
          inputs: shardings of its arguments.
          required: shardings that its outputs must have; None for any.
          preferences: what the consumers of its outputs would take.
          may_stay_unreduced: the mesh axes along which an output may stay so.
          shared: in how many iterations of loops around it each argument is the same.
          is_kept: whether other plans are given what is found.

        Returns:
          The plan, and what the program prefers its arguments in.
        """
        key = (
            id(program),
            tuple(inputs),
            tuple(required),
            tuple(preferences),
            tuple(may_stay_unreduced),
            tuple(shared),
        )
        if key in self.known.bodies:
            return self.known.bodies[key]
        decider = self.decider(program, inputs, shared)
        found = Rounds(
            program,
            inputs,
            required,
            preferences,
            may_stay_unreduced,
            decider,
            self.known.backward,
        ).solve()
        if is_kept:
            self.known.bodies[key] = found
        return found

    def decider(
        self, program: Program, inputs: Sequence[Sharding], shared: Sequence[int]
    ) -> Decider:
        """Of the nodes of a program that is about to be solved."""
        axes = range(len(self.axes.names))
        stays = any(is_stationary(axis, inputs) for axis in axes)
        return Decider(
            program,
            {},
            self.axes,
            self.small,
            self.control,
            self.solve,
            self.known.ops,
            least_sources(program) if stays else {},
            self.known.free_in(program),
            self.whole and stays,
            self.exchange,
            self.fed,
            dict(zip(program.inputs, shared, strict=True)),
        )


def propagate(
    program: Program,
    inputs: Sequence[Sharding],
    required: Sequence[Sharding | None],
    axes: Axes,
    small: int,
    control: Control = NOTHING_ASKED,
    whole: bool = False,
    exchange: bool = True,
    known: Known | None = None,
) -> BodyPlan:
    """Plans a whole step.

    Args:
      program: the traced step.
      inputs: sharding of every argument.
      required: sharding of every output that is given (the state's); None for others.
      axes: the mesh axes.
      small: elements below which unreduced values are reduced as late as possible.
      control: what is asked of the sums that loops accumulate.
      whole: whether small sums behind stationary leaves are all-reduced, rather than
        scattered to be gathered again.
      exchange: whether rows of the batch are exchanged where an op sends less so.
      known: what plans of this program decided that differ in `inputs` and `required`
        alone; this one adds to it. The program must live as long.

    Returns:
      The plan of the step, before any schedule pass.
    """
    fed = _fed(program, axes)
    solver = Solver(axes, small, control, whole, exchange, fed, known or Known())
    preferences = [
        tuple(frozenset({s}) if isinstance(s, Split) else frozenset({None}) for s in r)
        if r is not None
        else (frozenset(),) * len(axes.names)
        for r in required
    ]
    may_stay_unreduced = [frozenset[int]()] * len(required)
    once = [1] * len(inputs)
    return solver.solve(
        program, inputs, required, preferences, may_stay_unreduced, once, is_kept=False
    ).plan


def _fed(program: Program, axes: Axes) -> dict[Names, int]:
    """The gradients that a program feeds residuals to, and along which axis."""
    return {
        program.leaf(node.outputs[0]): axes.names.index(over)
        for node in program.nodes
        if node.kind == "op" and node.eqn.primitive is feed_back_p
        if (over := node.eqn.params["over"]) in axes.names
    }
