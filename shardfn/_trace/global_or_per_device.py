"""Whether a step is written on global arrays or for one device, found by tracing it.

In: the step, its arguments, and how the batch is split. Out: its jaxpr on the global
batch, for a step per device that of the global step that means the same.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardfn._core import compat
from shardfn._core.call_arguments import (
    Rest,
)
from shardfn._core.errors import (
    ShardingError,
    called,
    step_name,
)
from shardfn._core.sharding import Axes, Sharding
from shardfn._trace.per_device import GlobalStep, as_global, reaches_axis


def jaxpr_of(
    step: GlobalStep,
    states: tuple[Any, ...],
    batch: Rest,
    split: Sequence[Sharding],
    axes: Axes,
    names_axes: Callable[[], bool],
    own: Sequence[bool],
) -> tuple[Any, Any]:
    """The jaxpr of a global step, or else of a per-device one.

    A step that names a mesh axis is per device. One that fails on the global batch may
    be too, if it spells out local shapes before it names an axis: it is if it comes to
    name one on the batch of one device, and works so. Any other failure is the user's.
    """
    local = as_global(step, axes, split, batch.meaning.places, own)
    try:
        if any(own):
            return jax.make_jaxpr(local, return_shape=True)(states, batch)
        return jax.make_jaxpr(step, return_shape=True)(states, batch)
    except NameError as error:
        _check_axis(error, axes)
    except jax.errors.UnexpectedTracerError:
        raise
    except (TypeError, ValueError):
        if names_axes() and reaches_axis(step, axes, split, states, batch):
            with contextlib.suppress(Exception):
                return jax.make_jaxpr(local, return_shape=True)(states, batch)
        raise
    try:
        return jax.make_jaxpr(local, return_shape=True)(states, batch)
    except NameError as error:
        _check_axis(error, axes)
        raise
    except (AssertionError, NotImplementedError) as error:
        raise ShardingError(
            f"{step_name()} is written per device, and JAX cannot batch one of its "
            f"collectives over all devices: {str(error) or type(error).__name__}.\n"
            f"{called()}"
            "Where it gathers or permutes over several mesh axes at once, name them "
            "one by one: lax.all_gather(lax.all_gather(x, 'data'), 'replica')."
        ) from error


def _check_axis(error: NameError, axes: Axes) -> None:
    """Raises unless the trace failed because the step names one of our mesh axes."""
    name = compat.unbound_axis(error)
    if name is None:
        raise error
    if name not in axes.names:
        raise ShardingError(
            f"{step_name()} uses mesh axis '{name}', but fully_shard shards over "
            f"{axes.names}.\n"
            f"{called()}"
            f"Pass axis='{name}' to fully_shard, with a mesh that has this axis."
        ) from error
