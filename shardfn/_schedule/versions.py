"""Versions of values while a pass rewrites a plan.

In: a plan. Out: a version that it does not have yet, or the plan with some versions in
place of others.
"""

from collections.abc import Mapping
from dataclasses import replace

from shardfn._core.plan import Apply, BodyPlan, Ref, Reshard, reading


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


def fresh(body: BodyPlan, value: int) -> Ref:
    """A version of `value` that `body` does not have yet."""
    refs = list(body.imports)
    for step in body.steps:
        refs += step.makes if isinstance(step, Reshard) else step.exports
    versions = (ref.version for ref in refs if ref.value == value)
    return Ref(value, max(versions, default=0) + 1)
