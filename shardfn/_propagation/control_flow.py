"""How control flow is sharded: its bodies are solved like the program around them.

In: a scan, while, cond, remat or custom-derivative node, at its site. Out: a `Decision`
that holds the plans of the bodies; branches of a cond are joined.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardfn._core.sharding import (
    Sharding,
    Split,
)
from shardfn._propagation.decision import Decision
from shardfn._propagation.flow_site import FlowSite, Solved
from shardfn._propagation.loops import scan, while_loop


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
                body, operands, required, site.preferences, (frozenset(),) * count
            )
            for body in site.node.bodies
        ]

    free = solve([None] * count)
    joined = tuple(
        _join_branches([s.plan.output_shardings[j] for s in free]) for j in range(count)
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


def _join_branches(shardings: Sequence[Sharding]) -> Sharding:
    """Split as all branches that split agree; a replicated branch takes its
    block."""
    out = []
    for states in zip(*shardings, strict=True):
        splits = {s for s in states if isinstance(s, Split)}
        out.append(splits.pop() if len(splits) == 1 else None)
    return tuple(out)


_BY_KIND: dict[str, Callable[[FlowSite], Decision]] = {
    "remat": _remat,
    "custom": _remat,
    "scan": scan,
    "while": while_loop,
    "cond": _cond,
}
