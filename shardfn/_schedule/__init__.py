"""Stage 3, schedule: from plan to plan.

In: a program and its plan. Out: a plan that moves the same values better: gathers
shared, repeated, prefetched or joined, dtypes on the wire chosen; see `pipeline`.
Imports `_core`.
"""
