"""Versions of values while a pass rewrites a plan.

In: a plan. Out: versions that it does not have yet, one that only waits for another, or
the plan with some versions in place of others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.phases import Pass
from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, Step, reads
from shardfn._core.sharding import Sharding
from shardfn._core.sizes import itemsize


def reading(step: Step, name: Callable[[Ref], Ref]) -> Step:
    """`step` with the versions that it reads renamed."""
    if all(name(ref) == ref for ref in reads(step)):
        return step
    after = None if step.after is None else name(step.after)
    if isinstance(step, Reshard):
        return replace(step, source=name(step.source), after=after)
    operands = tuple(None if ref is None else name(ref) for ref in step.operands)
    imports = tuple(map(name, step.imports))
    return replace(step, operands=operands, imports=imports, after=after)


def without_moves(body: BodyPlan, instead: Mapping[Ref, Ref]) -> BodyPlan:
    """`body` without the moves that make some versions, each replaced by another."""

    def name(ref: Ref) -> Ref:
        return instead.get(ref, ref)

    return replace(
        body,
        steps=tuple(
            reading(step, name)
            for step in body.steps
            if isinstance(step, Apply) or step.result not in instead
        ),
        outputs=tuple(None if ref is None else name(ref) for ref in body.outputs),
        exports=tuple(map(name, body.exports)),
        handed=tuple(map(name, body.handed)),
    )


def tied(
    source: Ref, result: Ref, aval: Any, sharding: Sharding, during: Pass, after: Ref
) -> Reshard:
    """What makes `result`: `source`, like `aval`, no earlier than `after`."""
    return Reshard(
        source=source,
        result=result,
        path=(sharding,),
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        itemsize=itemsize(aval),
        during=during,
        after=after,
    )


def fresh_each(body: BodyPlan, values: Sequence[int]) -> list[Ref]:
    """A version of each value that `body` does not have yet, all of them others."""
    found = list[Ref]()
    for value in values:
        found.append(fresh(body, value))
        body = replace(body, imports=(*body.imports, found[-1]))
    return found


def fresh(body: BodyPlan, value: int) -> Ref:
    """A version of `value` that `body` does not have yet."""
    refs = list(body.imports)
    for step in body.steps:
        refs += step.makes if isinstance(step, Reshard) else step.exports
    versions = (ref.version for ref in refs if ref.value == value)
    return Ref(value, max(versions, default=0) + 1)
