"""The user's step, and what its arguments mean.

In: the step as written for one device, and the options that describe it. Out: which
arguments are state, how the batch is split, and the planned step for given shapes.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardfn._api.call_arguments import Named, by_position
from shardfn._api.names_in_code import mentions
from shardfn._api.planner import check_fallbacks, check_replicated, plan_traced
from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, step_name
from shardfn._core.leaf_options import Control
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.sharding import Axes, Sharding
from shardfn._lowering.planned_program import Planned
from shardfn._trace.containers import close_avals
from shardfn._trace.trace_step import trace
from shardfn.storage._leaves import batch_shardings

Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Side:
    """The state arguments of a call, or the others: leaves, shardings, structure."""

    leaves: tuple[Leaf, ...]
    shardings: tuple[Sharding, ...]
    treedef: Any

    @property
    def key(self) -> Hashable:
        types = (
            (x.aval.shape, x.aval.dtype, x.aval.weak_type, x.auto) for x in self.leaves
        )
        return self.treedef, self.shardings, *types

    @property
    def avals(self) -> Any:
        """The arguments as closed pytrees of `ShapeDtypeStruct`."""
        return close_avals(self.leaves, self.treedef)


@dataclass(frozen=True, slots=True)
class PlainStep:
    """A plain step.

    Attributes:
      step: the function that the user wrote.
      min_size: state leaves with fewer elements stay replicated.
      strict: whether a primitive without a rule is an error.
      state_argnums: positions of the state arguments.
      batch_spec: prefix pytree of PartitionSpecs of the batch, or None.
      control: what is asked of the moves of state leaves.
      plans: planned steps by structure, shapes and configuration of JAX.
    """

    step: Step
    min_size: int
    strict: bool
    state_argnums: tuple[int, ...]
    batch_spec: Any
    control: Control = Control()
    plans: dict[Any, Planned] = field(default_factory=dict)

    def divide(
        self, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """The state arguments of a call, and the others."""
        args = by_position(self.step, args, named)
        count = len(args) - any(isinstance(a, Named) for a in args)
        if count <= max(self.state_argnums):
            last = max(self.state_argnums)
            given = ", ".join(map(str, self.state_argnums))
            raise ShardingError(
                f"{step_name()} was called with {count} "
                f"argument{'s' * (count != 1)}, but its state is argument {last} "
                f"(state_argnums={given}).\n{called()}"
                "Pass the state there, or give fully_shard its position."
            )
        states = tuple(args[i] for i in self.state_argnums)
        rest = (a for i, a in enumerate(args) if i not in self.state_argnums)
        return states, tuple(rest)

    def call(self, states: Sequence[Any], batch: Sequence[Any]) -> Any:
        """Calls the plain step with its arguments in its own order."""
        named = batch[-1] if batch and isinstance(batch[-1], Named) else {}
        args = list(batch[:-1] if named else batch)
        for position, state in sorted(
            zip(self.state_argnums, states, strict=True), key=lambda pair: pair[0]
        ):
            args.insert(position, state)
        return self.step(*args, **named)

    def split(
        self,
        batch: tuple[Any, ...],
        leaves: Sequence[Leaf],
        axes: Axes,
        is_local: bool = False,
    ) -> tuple[Sharding, ...]:
        """How each leaf of the batch is split; shapes are local ones if `is_local`."""
        return batch_shardings(batch, leaves, self.batch_spec, axes, is_local)

    def planned(self, state: Side, batch: Side, axes: Axes) -> Planned:
        """The planned step for these arguments; traced once per shapes and structure,
        and per configuration of JAX, such as `jax.default_matmul_precision`.

        Args:
          state: the state arguments, on logical global shapes.
          batch: the other arguments, on global shapes.
          axes: the mesh axes.

        Returns:
          The planned step.
        """
        key = state.key, batch.key, axes, compat.configuration()
        if key not in self.plans:
            names = [leaf_name(leaf.path) for leaf in state.leaves]
            traced = trace(
                self.call,
                state.avals,
                batch.avals,
                state.leaves,
                batch.shardings,
                axes,
                names_axes=lambda: mentions(self.step, axes.names),
                own=[self.control.of(x).per_device_state for x in names],
            )
            # Primitives are traced anew to expand them.
            with compat.at_top_level(), compat.broadcasts_ranks():
                planned = plan_traced(
                    traced,
                    state.leaves,
                    state.shardings,
                    batch.shardings,
                    axes,
                    self.min_size,
                    self.control,
                )
            check_fallbacks(planned, self.strict)
            check_replicated(planned)
            self.plans[key] = planned
        return self.plans[key]
