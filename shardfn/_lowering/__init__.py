"""Stage 4, lowering: from a plan to the program that every device runs.

In: a program and its scheduled plan. Out: a function of local values that runs under
`shard_map`, with exactly the plan's collectives. Imports `_core`, and the stages before
it, since derivatives of custom functions are planned when they are asked for.
"""
