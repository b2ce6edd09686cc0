"""Which leaves of a state a step has chosen for the host's memory, as text.

In: an `OffloadChoice`. Out: a table for the plan, and the reason for one leaf.
"""

from shardfn._core.leaves import names_text
from shardfn._core.limits import OFFLOAD_COMPILATIONS
from shardfn._core.offloading import OffloadChoice
from shardfn.analysis._text import join_columns, size_text


def offload_table(choice: OffloadChoice) -> str:
    """The choice: a row for what leaves are to the step, then what it takes."""
    header = ["chosen for the host", "stored", "there", "leaves"]
    rows = [
        [
            group.role,
            size_text(group.bytes),
            size_text(group.host_bytes),
            names_text(sorted(group.on_host)),
        ]
        for group in choice.groups
        if group.leaves
    ]
    table = join_columns(header, rows, {1, 2})
    return "\n".join([table, "", _outcome(choice), *_holes(choice), *_trials(choice)])


def why_chosen(choice: OffloadChoice, leaf: str, role: str) -> str:
    """Why a leaf lives in the memory that it does."""
    if leaf in choice.leaves:
        return f"offload={choice.asked!r} stores it on the host: {_outcome(choice)}"
    if not choice.leaves:
        return f"offload={choice.asked!r} leaves it on the device: {_outcome(choice)}"
    return (
        f"offload={choice.asked!r} leaves it on the device: the step fits without, and "
        f"of the {role} no more goes than has to"
    )


def _holes(choice: OffloadChoice) -> list[str]:
    """What the estimates have for what no value fills."""
    if not choice.holes:
        return []
    return [
        f"with {choice.holes:.0%} more than lives at once, for the holes of the "
        "compiler's heap (limits.TPU_HEAP_HOLES)"
    ]


def _trials(choice: OffloadChoice) -> list[str]:
    """What a report compiled to correct the choice."""
    header = ["compiled", "on the host", "by the plan", "by the compiler"]
    rows = [
        [
            "fits" if t.compiled is not None and t.compiled <= choice.bound else "no",
            size_text(t.host_bytes),
            size_text(t.estimate),
            "refused" if t.compiled is None else size_text(t.compiled),
        ]
        for t in choice.trials
    ]
    most = f"at most {OFFLOAD_COMPILATIONS} (limits.OFFLOAD_COMPILATIONS)"
    return ["", join_columns(header, rows, {1, 2, 3}), most] if rows else []


def _outcome(choice: OffloadChoice) -> str:
    bound = f"{size_text(choice.bound)} (offload={choice.asked!r})"
    if choice.compiled is not None:
        verdict = "at most" if choice.fits else "which is more than"
        taken = f"compiled, a step takes {size_text(choice.compiled)} like this"
        return f"{taken}, {verdict} {bound}"
    without = f"by the plan, a step takes {size_text(choice.without)} of each device"
    if not choice.leaves:
        verdict = "at most" if choice.fits else "more than"
        return f"{without}, {verdict} {bound}"
    verdict = "of" if choice.fits else "which is still more than"
    return f"{without}, and {size_text(choice.taken)} like this, {verdict} {bound}"
