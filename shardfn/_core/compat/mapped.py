"""Functions that are mapped over an axis.

In: what `pmap`, `vmap` and `shard_map` made. Out: the function inside, and the axes.
"""

import dataclasses
import re
from typing import Any

from jax._src import core as _core, pmap as _private_pmap
from jax._src.interpreters import batching as _batching
from jax.extend.core import JaxprEqn

from shardfn._core.compat.source_lines import PACKAGE

DimAxes = tuple[tuple[str, ...], ...]
"""Per dimension, the mesh axes that split it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MappedPart:
    """What a `jax.shard_map` equation runs.

    Attributes:
      jaxpr: of one device.
      sizes: its manual mesh axes, and how many devices each has.
      in_specs: how its operands are split.
      out_specs: how its results are.
    """

    jaxpr: Any
    sizes: dict[str, int]
    in_specs: tuple[DimAxes, ...]
    out_specs: tuple[DimAxes, ...]


def mapped_part(eqn: JaxprEqn) -> MappedPart | None:
    """What a `jax.shard_map` equation of the user's runs; None of one that this package
    made, or whose specs say more than what is split over manual mesh axes."""
    params = eqn.params
    mapped_in = params["jaxpr"].debug_info.func_filename or ""
    if mapped_in.startswith(PACKAGE):
        return None
    shape, manual = params["mesh"].shape, params["newly_manual_axes"]
    specs = (*params["in_specs"], *params["out_specs"])
    if any(spec.unreduced or spec.reduced for spec in specs):
        return None

    def dims(v: Any, spec: Any) -> DimAxes:
        entries = [*spec, *[None] * (v.aval.ndim - len(spec))]
        return tuple(
            () if e is None else e if isinstance(e, tuple) else (e,) for e in entries
        )

    return MappedPart(
        jaxpr=params["jaxpr"],
        sizes={name: shape[name] for name in shape if name in manual},
        in_specs=tuple(map(dims, eqn.invars, params["in_specs"])),
        out_specs=tuple(map(dims, eqn.outvars, params["out_specs"])),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Pmapped:
    """What a `jax.pmap` was given: `axis_name` is None if none was given."""

    axis_name: str | None
    in_axes: Any
    static_argnums: tuple[int, ...]


def pmapped(fn: Any) -> Pmapped | None:
    """What `jax.pmap` was given for a function that it returned; None of other ones."""
    made = getattr(fn, "__code__", None)
    if made is None or made.co_filename != _private_pmap.__file__:
        return None
    settings = _closed_over(_closed_over(fn).get("infer_params"))
    if "axis_name" not in settings:
        return None
    name = settings["axis_name"]
    return Pmapped(
        axis_name=name if isinstance(name, str) and "_internal" not in name else None,
        in_axes=settings.get("in_axes", 0),
        static_argnums=tuple(settings.get("static_broadcasted_tuple", ())),
    )


def _closed_over(fn: Any) -> dict[str, Any]:
    """What a function has captured, by name."""
    names = fn.__code__.co_freevars if fn is not None else ()
    cells = fn.__closure__ or () if fn is not None else ()
    return {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}


def is_mapped(x: Any, name: str | None = None) -> bool:
    """Whether `x`, inside the innermost `jax.vmap`, depends on what is mapped over."""
    is_batched = isinstance(x, _batching.BatchTracer) and x.batch_dim is not None
    return is_batched and (name is None or x._trace.axis_data.name == name)


def named_axes() -> tuple[str, ...]:
    """The names that the `jax.vmap`s around here give to what they map over."""
    return tuple(_core.get_axis_env().axis_sizes)


def unbound_axis(error: NameError) -> str | None:
    """The axis name that a traced function uses without binding it, if that is why;
    whatever is in the name."""
    advice = r"\. To fix this, please call \w+ under `jax\.shard_map`\."
    found = re.search(rf"unbound axis name: (.*?)(?:{advice})?\Z", str(error), re.S)
    return found[1] if found else None
