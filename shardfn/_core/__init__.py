"""The nouns that all packages share: shardings, rules, programs, plans, errors.

In: nothing of the library. Out: values and the few functions that belong to them: mesh
axes and the sharding of a value, moves between shardings, op sharding rules, the traced
program, the plan, leaf options, errors, and everything that depends on JAX's version.
Imports no other package of `shardfn`.
"""
