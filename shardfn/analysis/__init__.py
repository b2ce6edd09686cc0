"""What a step moves and costs: plans as users read them, checks, reports, targets.

In: plans, and programs as compilers return them. Out: `Plan`, `Verification`, `Report`,
and the machines that a step can be compiled for without having them (`targets`).
Imports `_core`.
"""
