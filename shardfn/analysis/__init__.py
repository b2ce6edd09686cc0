"""What a step moves and costs: plans as users read them, checks, reports, targets.

In: plans, and programs as compilers return them. Out: `Plan`, `Verification`, `Report`,
and the machines that a step can be compiled for without having them (`targets`).
Imports `_core`.
"""

from shardfn.analysis import targets as targets
from shardfn.analysis.collective import Collective as Collective
from shardfn.analysis.plan import Plan as Plan
from shardfn.analysis.report import Report as Report, compare as compare
from shardfn.analysis.verification import (
    LineCheck as LineCheck,
    Verification as Verification,
)

__all__ = [
    "Collective",
    "LineCheck",
    "Plan",
    "Report",
    "Verification",
    "compare",
    "targets",
]
