"""How control flow is sharded: its bodies are solved like the program around them.

In: a scan, while, cond, remat or custom-derivative node, at its site. Out: a `Decision`
that holds the plans of the bodies; branches of a cond are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardfn._core.resharding import can_split
from shardfn._core.sharding import Axes, Sharding, Split, on_axis
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import FlowSite, Solved
from shardfn._propagation.loops import scan, while_loop
from shardfn._propagation.preferences import Preferences


def decide(site: FlowSite) -> Decision:
    """Decides one node by its kind."""
    return replace(_BY_KIND[site.node.kind](site), notes=tuple(site.notes))


def _remat(site: FlowSite) -> Decision:
    operands = tuple(map(site.entering, range(len(site.states))))
    solved = site.solve(
        site.node.bodies[0],
        operands,
        [None] * len(site.preferences),
        site.preferences,
        site.may_stay_unreduced,
        site.shared_in(0),
    )
    out = solved.plan.output_shardings
    return Decision(operands, out, out, (), (solved.plan,), solved.preferences)


def _cond(site: FlowSite) -> Decision:
    index = site.axes.replicated
    operands = tuple(map(site.entering, site.node.regions[0].operands))
    count = len(site.result_avals)

    def solve(required: Sequence[Sharding | None]) -> list[Solved]:
        return [
            site.solve(
                body,
                operands,
                required,
                site.preferences,
                (frozenset(),) * count,
                site.shared_in(i),
            )
            for i, body in enumerate(site.node.bodies)
        ]

    free = solve([None] * count)
    joined = tuple(
        _join_branches(
            [s.plan.output_shardings[j] for s in free],
            site.preferences[j],
            site.result_avals[j],
            site.axes,
        )
        for j in range(count)
    )
    solved = solve(joined)
    preferences = [
        tuple(frozenset().union(*sets) for sets in zip(*each, strict=True))
        for each in zip(*(s.preferences for s in solved), strict=True)
    ]
    whole = tuple(frozenset({None}) for _ in site.axes.names)
    return Decision(
        (index, *operands),
        joined,
        joined,
        (),
        tuple(s.plan for s in solved),
        (whole, *preferences),
    )


def _join_branches(
    shardings: Sequence[Sharding], preferences: Preferences, aval: Any, axes: Axes
) -> Sharding:
    """Split as a branch splits: if they differ, as the one that is most as preferred.
    What a replicated branch makes is cut."""

    def preferred(each: Sharding) -> tuple[int, int]:
        splits = [isinstance(s, Split) for s in each]
        likes = [s in w for s, w in zip(each, preferences, strict=True)]
        return sum(map(all, zip(splits, likes, strict=True))), sum(splits)

    out = axes.replicated
    for each in sorted(shardings, key=preferred, reverse=True):
        for axis, state in enumerate(each):
            if isinstance(state, Split) and out[axis] is None:
                if can_split(getattr(aval, "shape", ()), out, axis, state, axes):
                    out = on_axis(out, axis, state)
    return out


_BY_KIND: dict[str, Callable[[FlowSite], Decision]] = {
    "remat": _remat,
    "custom": _remat,
    "scan": scan,
    "while": while_loop,
    "cond": _cond,
}
