"""Stage 2, propagation: from a `Program` to a plan.

In: a program and the shardings of its arguments and of its state. Out: a `BodyPlan`:
which factors every operation splits, and where values are resharded. Imports `_core`.
"""
