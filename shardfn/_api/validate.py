"""Whether the arguments of `fully_shard` are what they may be.

In: values as users write them. Out: the same in one form, or an error that
names the option, the value and what is allowed. `_core/control.py` checks the options
that may differ from leaf to leaf.
"""

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from shardfn._api.local_step import LocalStep
from shardfn._api.options import Options
from shardfn._api.predicted_latencies import LATENCIES
from shardfn._api.sharded_step import VERIFY, ShardedStep
from shardfn._core.argument_values import FLAG, count_of
from shardfn._core.control import Control
from shardfn._core.errors import ShardingError, call_site, cannot_be, without_bound
from shardfn._core.optional import in_use
from shardfn._core.sharding import named_twice

_OF_A_MESH = {"verify": "off", "compiler_options": None, "latencies": None}
"""Options of a whole compiled program, and what they are where nothing is asked."""

_NETWORKS = "flax.linen", "flax.nnx", "equinox"
"""Libraries whose `Module` is a network; looked at if they are imported."""

_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def check_step(step: Any, asker: str = "fully_shard") -> None:
    """Raises if the `step` that `asker` was given is no function, or is sharded
    already."""
    plain = without_bound(step)
    if isinstance(plain, ShardedStep | LocalStep):
        raise ShardingError(
            f"{getattr(plain, '__name__', 'the step')} is sharded already: it is a "
            f"{type(plain).__name__}, which fully_shard made.\n"
            f"  {asker} was called at {call_site()}\n"
            "Pass the plain function: the sharded one has it as __wrapped__."
        )
    if isinstance(step, Mesh):
        cannot_be("train_step", step, "Pass the step first, or fully_shard(mesh=mesh).")
    if _is_model(step):
        raise ShardingError(
            f"{asker} takes the whole training step, not a model: "
            f"{type(step).__name__} is one.\n"
            f"  {asker} was called at {call_site()}\n"
            "Write train_step(state, batch) -> (state, metrics) with the model, its "
            "gradients and the update in it, and shard that: see From PyTorch FSDP2."
        )
    if not callable(step):
        cannot_be("train_step", step, "Pass a function (state, batch) -> (state, ...).")


def _is_model(step: Any) -> bool:
    """Whether this is a module of a library for networks. A step may be a module too,
    if it takes a state and a batch."""
    libraries = in_use(*_NETWORKS)
    modules = tuple(library.Module for library in libraries if library is not None)
    if not isinstance(step, modules):
        return False
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # it cannot be called
        return True
    needed = [p for p in parameters if p.kind in _BY_POSITION and p.default is p.empty]
    return len(needed) < 2 and all(p.kind is not p.VAR_POSITIONAL for p in parameters)


def check_mesh(mesh: Any) -> None:
    """Raises if `mesh` is neither a mesh of devices nor None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        advice = "Pass a mesh, such as jax.make_mesh((jax.device_count(),), ('data',))"
        cannot_be("mesh", mesh, f"{advice}, or None for a step inside jax.shard_map.")


def check_axis(axis: Any) -> tuple[str, ...]:
    """The names of the mesh axes."""
    names = (axis,) if isinstance(axis, str) else axis
    if not _is_list(names, lambda name: isinstance(name, str)):
        cannot_be("axis", axis, "Pass a mesh axis, such as 'data', or a tuple of them.")
    twice = named_twice(names)
    if twice is not None:
        raise ShardingError(
            f"axis={tuple(names)} names mesh axis '{twice}' twice.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Name each mesh axis once, major to minor."
        )
    return tuple(names)


def check_argnums(argnums: Any) -> tuple[int, ...] | None:
    """The positions of the state; None if they are to be found."""
    if isinstance(argnums, str) and argnums == "auto":
        return None
    given: Any = (argnums,) if count_of(argnums) is not None else argnums
    if not _is_list(given, lambda n: count_of(n) is not None):
        advice = (
            "Pass the state's position counted from 0, a tuple of several, or 'auto'."
        )
        cannot_be("state_argnums", argnums, advice)
    numbers = tuple(operator.index(n) for n in given)
    if len(set(numbers)) < len(numbers):
        cannot_be("state_argnums", argnums, "Pass each position once.")
    return numbers


def check_min_size(size: Any) -> int:
    """The number of elements from which leaves are sharded."""
    count = count_of(size)
    if count is None:
        advice = "Pass a number of elements, such as 2**14, or 0 to shard every leaf."
        cannot_be("min_size", size, advice)
    return count


def check_names(names: Sequence[str], mesh: Mesh) -> None:
    """Raises if `mesh` does not have an axis of `names`."""
    for name in names:
        if name not in mesh.shape:
            asked = tuple(names)
            sizes = (*[1] * (len(asked) - 1), mesh.size)
            more = " and sizes of your own" if len(asked) > 1 else ""
            raise ShardingError(
                f"the mesh has no axis '{name}'; its axes are {tuple(mesh.shape)}.\n"
                f"  fully_shard was called at {call_site()}\n"
                f"Pass axis={tuple(mesh.shape)[0]!r}, or make the mesh with "
                f"jax.make_mesh({sizes}, {asked}){more}."
            )


def check_example(shard_for: Any) -> None:
    """Raises if `shard_for` is no tuple of a step's arguments."""
    if shard_for is not None and type(shard_for) is not tuple:
        raise ShardingError(
            f"shard_for is a {type(shard_for).__name__}, not a tuple of the step's "
            f"arguments.\n  fully_shard was called at {call_site()}\n"
            "Pass shard_for=(state, batch), arrays or what jax.eval_shape returns."
        )


def check_needs_no_mesh(options: Options, control: Control) -> None:
    """Raises if one of `options`, which are given without a mesh, needs one."""
    for option, default in _OF_A_MESH.items():
        if options.get(option) != default:
            raise ShardingError(
                f"{option}={options[option]!r} needs a mesh: without one the step "
                "becomes part of a program that the caller compiles.\n"
                f"  fully_shard was called at {call_site()}\n"
                "Pass a mesh, or leave it out and say it of the whole program, "
                "with plan.verify(compiled) or jax.jit(..., compiler_options=...)."
            )
    if options.get("shard_for") is not None:
        raise ShardingError(
            "shard_for needs a mesh: without one nobody knows yet over how many "
            "devices a dimension is split.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Pass a mesh, or dimensions: shard={path: {axis: dimension}}."
        )
    for group in sorted(control.groups):
        raise ShardingError(
            f"reshard_after_forward={group} needs a mesh, whose axis it divides "
            "into groups: one that the caller has bound stays in one piece.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Pass a mesh, or True or False."
        )
    patterns = control.given.get("per_device_state", ())
    if patterns:
        raise ShardingError(
            f"per_device_state={tuple(patterns)!r} needs a mesh: without "
            "one the step sees what one device holds, and nothing else.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Pass a mesh, or keep such leaves out of the state."
        )
    if any(control.asked("offload")):
        raise ShardingError(
            f"offload={control.given.get('offload')!r} needs a mesh: without one the "
            "caller's own program takes the state, and says in which memory.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Pass a mesh, or leave offload out."
        )


def check_flags(**flags: Any) -> None:
    """Raises if one of `flags` is neither True nor False."""
    for option, value in flags.items():
        if not FLAG.is_one(value):
            cannot_be(option, value, FLAG.advice)


def check_verify(verify: Any) -> None:
    """Raises if `verify` is none of `VERIFY`."""
    if not any(isinstance(verify, str) and verify == known for known in VERIFY):
        raise ShardingError(
            f"verify={verify!r} is none of {', '.join(map(repr, VERIFY))}.\n"
            f"  fully_shard was called at {call_site()}\n"
            "Pass 'error' or 'warn' to hold the compiled step against the plan."
        )


def check_latencies(latencies: Any) -> None:
    """Raises if `latencies` is neither None nor one of `LATENCIES`."""
    known = isinstance(latencies, str) and latencies in LATENCIES
    if latencies is not None and not known:
        cannot_be("latencies", latencies, "Pass 'predicted', 'xla' or None.")


def _is_list(values: Any, is_one: Callable[[Any], bool]) -> bool:
    is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
    return is_sequence and len(values) > 0 and all(map(is_one, values))
