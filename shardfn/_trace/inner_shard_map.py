"""Parts of a step that the user wrote per device, in a `jax.shard_map` of their own.

In: a traced step. Out: the same on whole arrays: devices become dimensions of the
arrays, one for each mesh axis, which `jax.vmap` names. These are the outer parts of the
dimensions that `in_specs` splits, so a batch that is split already stays where it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from shardfn._core import compat
from shardfn._core.errors import ShardingError, called, nested, step_name, where
from shardfn._core.sharding import Axes
from shardfn._trace.device_rolls import handed_on
from shardfn._trace.per_device import check_keys


def on_whole_arrays(jaxpr: Any, axes: Axes) -> Any:
    """`jaxpr` with every `shard_map` over axes of the step's mesh, also one in
    control flow, replaced by a call that computes the same of whole arrays.

    Args:
      jaxpr: closed or not.
      axes: the mesh axes that the step is sharded over.

    Returns:
      The jaxpr. A `shard_map` over axes of another mesh is left.

    Raises:
      ShardingError: JAX cannot batch one of its collectives.
    """
    if not any(eqns[-1].primitive.name == "shard_map" for eqns in nested(jaxpr)):
        return jaxpr

    def inside(param: Any) -> Any:
        if type(param) is tuple:
            return tuple(map(inside, param))
        return on_whole_arrays(param, axes) if _is_jaxpr(param) else param

    def changed(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name != "shard_map":
            params = {name: inside(value) for name, value in eqn.params.items()}
            return eqn.replace(params=params)
        part = compat.mapped_part(eqn)
        return eqn if part is None or not _is_over(part, axes) else _whole(eqn, part)

    return compat.with_equations(jaxpr, changed)


def _is_jaxpr(param: Any) -> bool:
    return hasattr(param, "eqns") or hasattr(param, "jaxpr")


def _is_over(part: compat.MappedPart, axes: Axes) -> bool:
    """Whether a part splits arrays over none but axes of the step's mesh: those that
    it is sharded over, and those that are left to XLA."""
    own = {**dict(axes.mesh), **dict(zip(axes.names, axes.sizes, strict=True))}
    named = {a for spec in (*part.in_specs, *part.out_specs) for d in spec for a in d}
    return all(own.get(name) == part.sizes[name] for name in named) and not any(
        eqns[-1].primitive.name in ("shard_map", *compat.UNREDUCED_COLLECTIVES)
        for eqns in nested(part.jaxpr)
    )


def _whole(eqn: JaxprEqn, part: compat.MappedPart) -> JaxprEqn:
    """A call in the place of `eqn` that computes the same of whole arrays."""
    avals = [compat.abstract(v.aval) for v in eqn.invars]
    try:
        with compat.without_mesh(), compat.broadcasts_ranks(), compat.as_user_code(eqn):
            closed = jax.make_jaxpr(lambda *xs: _over_devices(part, xs))(*avals)
    except (AssertionError, NotImplementedError) as error:
        raise ShardingError(
            f"{step_name()} uses jax.shard_map, and JAX cannot batch one of its "
            f"collectives over all devices: {str(error) or type(error).__name__}.\n"
            f"  at {where(eqn)}\n{called()}"
            "Where it permutes over several mesh axes at once or within groups, write "
            "this part on whole arrays."
        ) from error
    check_keys(closed)
    return compat.calling(closed, eqn)


def _over_devices(part: compat.MappedPart, operands: Sequence[Any]) -> list[Any]:
    """The part's results on whole arrays, under one vmap per mesh axis."""

    def one_device(*args: Any) -> list[Any]:
        return _evaluated(part.jaxpr, args)

    run: Callable[..., Any] = one_device
    for name in reversed(part.sizes):
        run = jax.vmap(
            _alike_unless(run, name, [_names(s, name) for s in part.out_specs]),
            in_axes=tuple(0 if _names(s, name) else None for s in part.in_specs),
            out_axes=[0 if _names(s, name) else None for s in part.out_specs],
            axis_name=name,
            axis_size=part.sizes[name],
        )
    blocks = [
        _blocks(x, s, part.sizes) for x, s in zip(operands, part.in_specs, strict=True)
    ]
    out = run(*blocks)
    return [_joined(x, s, part.sizes) for x, s in zip(out, part.out_specs, strict=True)]


def _alike_unless(
    run: Callable[..., Any], name: str, differing: Sequence[bool]
) -> Callable[..., Any]:
    """`run`, whose results are the first device's of mesh axis `name`, unless asked to
    differ. Most are equal as they are, since a collective made them."""

    def inner(*args: Any) -> list[Any]:
        return [
            lax.all_gather(x, name)[0]
            if compat.is_mapped(x, name) and not differs
            else x
            for x, differs in zip(run(*args), differing, strict=True)
        ]

    return inner


def _names(spec: compat.DimAxes, name: str) -> bool:
    return any(name in names for names in spec)


def _leading(spec: compat.DimAxes, sizes: dict[str, int]) -> list[str]:
    """The mesh axes that a spec names, as the dimensions of devices are ordered."""
    return [name for name in sizes if _names(spec, name)]


def _blocks(x: jax.Array, spec: compat.DimAxes, sizes: dict[str, int]) -> jax.Array:
    """`x` with a leading dimension for each mesh axis that splits one of its own."""
    shape: list[int] = []
    at: dict[str, int] = {}
    for size, names in zip(x.shape, spec, strict=True):
        for name in names:
            at[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    front = [at[name] for name in _leading(spec, sizes)]
    rest = [d for d in range(len(shape)) if d not in front]
    return x.reshape(shape).transpose(*front, *rest) if front else x


def _joined(x: jax.Array, spec: compat.DimAxes, sizes: dict[str, int]) -> jax.Array:
    """What `_blocks` makes `x` of."""
    front = _leading(spec, sizes)
    if not front:
        return x
    order: list[int] = []
    shape: list[int] = []
    for dim, names in enumerate(spec, len(front)):
        size = x.shape[dim]
        for name in names:
            order.append(front.index(name))
            size *= sizes[name]
        order.append(dim)
        shape.append(size)
    return x.transpose(order).reshape(shape)


def _evaluated(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr that was traced for one device, without its types: over
    which mesh axes values vary."""
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    env = dict(zip(jaxpr.constvars, map(compat.untyped_value, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return (
            env[atom]
            if not isinstance(atom, Literal)
            else compat.untyped_value(atom.val)
        )

    for eqn in jaxpr.eqns:
        with compat.as_user_code(eqn):
            results = _results(
                compat.untyped_equation(eqn), list(map(read, eqn.invars))
            )
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _results(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """The results of one equation of such a jaxpr."""
    called = compat.called_body(eqn)
    if called is not None:
        return _evaluated(called, operands)
    if compat.is_type_cast(eqn):
        return operands
    collective = _COLLECTIVES.get(eqn.primitive.name)
    if collective is not None:
        return [collective(x, **eqn.params) for x in operands]
    if eqn.primitive.name == "axis_index":
        return [lax.axis_index(eqn.params["axis_name"])]
    if eqn.primitive is compat.remat_p:
        body = eqn.params["jaxpr"]
        none = [False] * len(operands)
        return compat.bind_remat(
            eqn, lambda *xs: _evaluated(body, xs), operands, none, none, ()
        )
    params = {name: _untyped(value) for name, value in eqn.params.items()}
    out = compat.rebind(eqn.replace(params=params), *operands)
    return out if eqn.primitive.multiple_results else [out]


def _untyped(param: Any) -> Any:
    """A parameter of an equation, where it is a jaxpr traced again without types."""
    if type(param) is tuple:
        return tuple(map(_untyped, param))
    if not _is_jaxpr(param):
        return param
    avals = [compat.abstract(v.aval) for v in compat.open_jaxpr(param)[0].invars]
    return jax.make_jaxpr(lambda *xs: _evaluated(param, xs))(*avals)


def _psum(x: jax.Array, axes: tuple[str, ...], **params: Any) -> jax.Array:
    return lax.psum(x, axes, **params)


def _all_gather(
    x: jax.Array,
    all_gather_dimension: int,
    axis_name: Sequence[str],
    tiled: bool,
    axis_index_groups: Any = None,
    **_: Any,
) -> jax.Array:
    """Gathers over one mesh axis after the other: JAX batches no more at once."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for count, name in enumerate(reversed(names)):
        x = lax.all_gather(
            x,
            name,
            axis=all_gather_dimension,
            tiled=tiled,
            axis_index_groups=axis_index_groups,
        )
        if count and not tiled:
            d = all_gather_dimension
            x = x.reshape(*x.shape[:d], -1, *x.shape[d + 2 :])
    return x


def _reduce_scatter(
    x: jax.Array,
    scatter_dimension: int,
    axis_name: Sequence[str],
    tiled: bool,
    axis_index_groups: Any = None,
    **_: Any,
) -> jax.Array:
    """Scatters over one mesh axis after the other."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    d = scatter_dimension
    if not tiled and len(names) > 1:
        sizes = [lax.axis_size(name) for name in names]
        x = x.reshape(*x.shape[:d], *sizes, *x.shape[d + 1 :])
    for name in names:
        x = lax.psum_scatter(
            x,
            name,
            scatter_dimension=d,
            tiled=tiled,
            axis_index_groups=axis_index_groups,
        )
    return x


def _ppermute(x: jax.Array, axis_name: Any, perm: Any, **_: Any) -> jax.Array:
    """A roll along the dimension of devices, of which XLA makes a collective-permute;
    JAX's own rule gathers, and takes no permutation that leaves devices out."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    name, *others = names
    if others or compat.named_axes() != names:  # which dimension it is, is not known
        return lax.ppermute(x, axis_name, perm)
    return handed_on(x, name, tuple(perm))


_COLLECTIVES: dict[str, Callable[..., jax.Array]] = {
    "ppermute": _ppermute,
    "psum_invariant": _psum,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
