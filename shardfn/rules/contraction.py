"""Rules of contractions: dot_general, conv_general_dilated, ragged_dot_general.

In: an equation of two operands that are multiplied and summed over shared dimensions.
Out: mapped batch and free dimensions, and summed contracting dimensions.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from shardfn._core.compat import primitives
from shardfn._core.make_rule import make_rule
from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.rule_registry import LocalOp, register_rule
from shardfn.rules._factors import fresh_names, result_shape, shape_of, take, unmatched


@register_rule(*primitives("dot_general"))
def _dot_general(eqn: JaxprEqn) -> OpShardingRule:
    """`a c b, a b d -> a c d  reduce={b}` for a batched matrix product."""
    lhs, rhs, batch, contract, free = _dot_factors(
        shape_of(eqn, 0), shape_of(eqn, 1), eqn.params["dimension_numbers"]
    )
    return make_rule(eqn, [lhs, rhs], [(*batch, *free)], reduce=contract, linear="each")


def _dot_factors(
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    dimension_numbers: tuple,
    rhs_groups: Sequence[int] = (),
) -> tuple[list[str], list[str], tuple[str, ...], tuple[str, ...], list[str]]:
    """Names of the dimensions of both sides; the batch, contracting and free names.

    Dimensions of `rhs_groups` get names but stand in no result.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    names = fresh_names()
    batch = take(names, len(lhs_batch))
    contract = take(names, len(lhs_contract))
    sides, free = [], []
    for shape, batched, contracted, groups in (
        (lhs_shape, lhs_batch, lhs_contract, ()),
        (rhs_shape, rhs_batch, rhs_contract, rhs_groups),
    ):
        known = dict(zip((*batched, *contracted), (*batch, *contract), strict=True))
        side = [known[d] if d in known else next(names) for d in range(len(shape))]
        free += [f for d, f in enumerate(side) if d not in known and d not in groups]
        sides.append(side)
    return sides[0], sides[1], batch, contract, free


@register_rule(*primitives("ragged_dot_general"))
def _ragged_dot_general(eqn: JaxprEqn) -> OpShardingRule:
    """`b a, c a d, e -> b d  reduce={a}  whole={c, e}` for ragged rows.

    The groups stay whole: their sizes say which rows of a block belong to which group.
    A ragged contracting dimension adds a leading group dimension to the result.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    groups = tuple(numbers.rhs_group_dimensions)
    lhs, rhs, batch, contract, free = _dot_factors(
        shape_of(eqn, 0), shape_of(eqn, 1), numbers.dot_dimension_numbers, groups
    )
    prefix = [lhs[d] for d in _before_ragged(len(lhs), numbers)]
    used = {*lhs, *rhs}
    names = (name for name in fresh_names() if name not in used)
    extra = take(names, len(result_shape(eqn)) - len(batch) - len(free))
    (group,) = take(names, 1)
    counts = [*prefix, group] if len(shape_of(eqn, 2)) > 1 else [group]
    whole = {group, *extra, *(rhs[d] for d in groups)}
    return make_rule(
        eqn,
        [lhs, rhs, counts],
        [(*extra, *batch, *free)],
        reduce=contract,
        whole=whole,
        linear=[[0], [1]],
        groups={lhs[numbers.lhs_ragged_dimensions[0]]: 2},
    )


def _before_ragged(rank: int, numbers: Any) -> list[int]:
    """Dimensions of the left operand along which the group sizes may differ."""
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    free = [d for d in range(rank) if d not in (*batch, *contract)]
    own = next(dims for dims in (list(batch), list(contract), free) if ragged in dims)
    leading = [] if ragged in batch else batch
    return [*leading, *own[: own.index(ragged)]]


def _conv_local(op: LocalOp, lhs: jax.Array, rhs: jax.Array) -> Sequence[jax.Array]:
    counts = {
        key: op.size("g")
        for key in ("feature_group_count", "batch_group_count")
        if op.eqn.params[key] > 1
    }
    return op.bind(lhs, rhs, **counts)


@register_rule(*primitives("conv_general_dilated"), local=_conv_local)
def _conv_general_dilated(eqn: JaxprEqn) -> OpShardingRule:
    """`n i a, o i b -> n o c  reduce={i}  whole={a, b, c}` for NCW, OIW.

    With feature groups `n (g i) a, (g o) i b -> n (g o) c`; with batch groups
    `(g n) i a, (g o) i b -> n (g o) c`. A window of one element maps its dimension.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    lhs_specs, rhs_specs, out_specs = (
        numbers.lhs_spec,
        numbers.rhs_spec,
        numbers.out_spec,
    )
    batch, features = _grouped(params, "n"), _grouped(params, "i")
    outputs: Dim = ("g", "o") if groups > 1 else ("o",)
    lhs, rhs, out = (dict[int, str | Dim]() for _ in range(3))
    lhs |= {lhs_specs[0]: batch, lhs_specs[1]: features}
    rhs |= {rhs_specs[0]: outputs, rhs_specs[1]: "i"}
    out |= {out_specs[0]: "n", out_specs[1]: outputs}
    spatial = (name for name in fresh_names() if name not in "ngio")
    for k, dims in enumerate(
        zip(lhs_specs[2:], rhs_specs[2:], out_specs[2:], strict=True)
    ):
        lhs[dims[0]], rhs[dims[1]] = take(spatial, 2)
        trivial = _is_trivial_window(eqn, k, dims[1])
        out[dims[2]] = lhs[dims[0]] if trivial else next(spatial)
    operands = [_in_order(lhs), _in_order(rhs)]
    result = _in_order(out)
    windows = [d for d in rhs.values() if d not in (outputs, "i")]
    whole = {
        *unmatched(_names(lhs), _names(out), "i"),
        *unmatched(_names(out), _names(lhs), _names(rhs)),
        *(d for d in windows if isinstance(d, str)),
    }
    sizes = {
        "g": groups,
        "n": result_shape(eqn)[out_specs[0]],
        "i": shape_of(eqn, 1)[rhs_specs[1]],
        "o": shape_of(eqn, 1)[rhs_specs[0]] // groups,
    }
    if groups == 1:
        del sizes["g"]
    return make_rule(
        eqn,
        operands,
        [result],
        sizes=sizes,
        reduce="i",
        whole=whole,
        linear="each",
    )


def _grouped(params: dict, name: str) -> Dim:
    """The left operand's dimension `name`, with the group factor if it is grouped."""
    key = {"n": "batch_group_count", "i": "feature_group_count"}[name]
    return ("g", name) if params[key] > 1 else (name,)


def _in_order(dims: dict[int, str | Dim]) -> list[str | Dim]:
    return [dims[d] for d in range(len(dims))]


def _names(dims: dict[int, str | Dim]) -> list[str]:
    return [f for d in dims.values() for f in ((d,) if isinstance(d, str) else d)]


def _is_trivial_window(eqn: JaxprEqn, k: int, rhs_dim: int) -> bool:
    """Whether windows along spatial dimension `k` hold one element each, in order."""
    params = eqn.params
    return (
        shape_of(eqn, 1)[rhs_dim] == 1
        and params["window_strides"][k] == 1
        and params["lhs_dilation"][k] == 1
        and tuple(params["padding"][k]) == (0, 0)
    )
