"""How the batch of a step is divided over the devices.

In: the batch's leaves, and the state that it meets. Out: a sharding per leaf; of a leaf
that may be a raw PRNG key or rows, what a trace of the step says.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from shardfn._api.argument_leaves import (
    keys_in,
    other_shapes,
    types_of,
    without_row,
)
from shardfn._core import compat
from shardfn._core.call_arguments import (
    Rest,
    StateArguments,
)
from shardfn._core.control import Control
from shardfn._core.leaves import Leaf, leaf_name
from shardfn._core.recent import Recent
from shardfn._core.sharding import Axes, Sharding
from shardfn.storage._leaves import batch_shardings


@dataclass(frozen=True, slots=True)
class BatchDivision:
    """Divides the batches of one plain step.

    Attributes:
      call: calls the step as `call(states, batch)`.
      batch_spec: prefix pytree of PartitionSpecs of the batch, or None.
      control: what is asked of leaves of the state.
      keys: which leaves of a batch are raw PRNG keys, by types; None if not known.
    """

    call: Callable[..., Any]
    batch_spec: Any
    control: Control
    keys: Recent[Hashable, frozenset[int] | None]

    def shardings(
        self,
        batch: tuple[Any, ...],
        leaves: Sequence[Leaf],
        axes: Axes,
        states: tuple[Sequence[Leaf], Any],
        same: Sequence[Collection[str]] | None = None,
    ) -> tuple[Sharding, ...]:
        """How each leaf of the batch is split.

        Args:
          batch: the arguments that are not state.
          leaves: their leaves.
          axes: the mesh axes.
          states: the leaves of the state, on logical shapes, and their structure.
          same: if `leaves` have the shapes of one device's part, the mesh axes over
            which the type of each says that it is the same.

        Returns:
          One sharding per leaf.
        """
        is_local = same is not None
        meaning = batch.meaning if isinstance(batch, Rest) else StateArguments()
        split = functools.partial(
            batch_shardings,
            batch,
            leaves,
            _of_batch(self.batch_spec, batch, meaning),
            axes,
            is_local,
            same or (),
            may_be_whole=meaning.is_forward_only,
        )

        def keys_among(unsure: Sequence[int]) -> Collection[int]:
            """The raw keys among some leaves: the step is traced on these shapes, or,
            if it fails there, on those of the other parts, and tells."""
            types = types_of(states, batch, leaves)
            key = types, axes, same and tuple(same), compat.configuration()
            if key not in self.keys:
                self.keys[key] = self._keys(batch, leaves, states, axes)
                if self.keys[key] is None:
                    other = split(raw_keys=lambda unsure: unsure)
                    shapes = other_shapes(leaves, other, axes, is_local)
                    self.keys[key] = self._keys(batch, shapes, states, axes)
            found = self.keys[key]
            if found is None:  # whatever fails is reported by the trace that follows
                uneven = [i for i in unsure if leaves[i].aval.shape[0] % axes.devices]
                return () if is_local else uneven
            return found

        return split(hints=meaning.hints, raw_keys=keys_among)

    def _keys(
        self,
        batch: tuple[Any, ...],
        leaves: Sequence[Leaf],
        states: tuple[Sequence[Leaf], Any],
        axes: Axes,
    ) -> frozenset[int] | None:
        """Which leaves of the batch are raw keys; None if the step cannot be traced."""
        rows = [self.control.of(leaf_name(x.path)).per_device_state for x in states[0]]
        own = [
            without_row(x) if row else x for x, row in zip(states[0], rows, strict=True)
        ]
        return keys_in(self.call, batch, leaves, (own, states[1]), axes)


def _of_batch(spec: Any, batch: tuple[Any, ...], meaning: StateArguments) -> Any:
    """What of `batch_spec` is for the batch, if it is a tuple that counts arguments too
    that were found to be read only, as the caller may not know: those are stored as the
    state is."""
    fixed = () if meaning.by_hand else meaning.read_only
    counts = isinstance(spec, tuple | list) and not isinstance(spec, PartitionSpec)
    if not fixed or not counts or len(spec) != len(batch) + len(fixed):
        return spec
    if len(batch) == 1 and isinstance(batch[0], tuple | list):
        return spec  # the one argument's own
    returned = {p for p in meaning.arguments if p not in fixed}
    others = (p for p in itertools.count() if p not in returned)
    kept = [x for p, x in zip(others, spec, strict=False) if p not in fixed]
    return kept[0] if len(kept) == 1 else tuple(kept)
