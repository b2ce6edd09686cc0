"""Stage 1, trace: from the user's step to a `Program`.

In: a pure training step and the types of its arguments. Out: a jaxpr with its names,
and a program of numbered values. Imports `_core`.
"""
