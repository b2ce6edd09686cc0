"""How much of a compiled program is read, how closely, and what reports call it; and
when its results count as equal to the plain step's.

In: nothing. Out: numbers, each with its unit and its reason. None of them changes a
plan.
"""

SUBSET_BITS = 2**29
"""Of the table in which lines are looked up that one concatenated sum is made of; a
larger one is not made."""

SAME_SIZE = 0.01
"""How much the bytes per element of a compiled collective may differ from the plan's,
as a part, to be called the same."""

ALL_REDUCED_SHARE = 0.001
"""The part of a step's bytes up to which what is all-reduced in place of a gather or a
reduce-scatter leaves the step as planned: twice that is sent."""

TILED_MORE = 0.25
"""How many more rows a part of a sum may have in a TPU's program, as a part of those
that a device keeps, or less than a tile more: libtpu made 420 rows 480."""

PLAYED_ITERATIONS = 256
"""Iterations of a loop that are played; more take as long as the last of them."""

OFFSET_ITERATIONS = 4
"""The first iterations of a loop, beside the last one, in which it is looked at where
XLA has parts of stacks begin: it goes wrong at once, or at the end, where it does not
clamp."""

SCALAR_ITERATIONS = 20_000
"""Iterations of all loops of a program whose scalars are computed: a second."""

PREALLOCATED_SHARE = 0.75
"""The part of a GPU's memory that JAX takes by default, as its documentation says."""

HOST_BOUND = 0.1
"""The part of a step that waits for copies from and to the host from which on a report
calls the step bound by that link."""

HOST_HIDDEN = 0.005
"""The same below which it calls them hidden: less than what data sheets round."""

# When a sharded step counts as equal to the plain one

SMALLEST_NORM = 1e-6
"""A leaf of a smaller norm counts as zero: its difference is compared as it is."""

ROUNDING_TRIALS = 4
"""Ways of rounding that are tried, to know how much a leaf depends on it."""

ROUNDING_FACTOR = 4
"""How many times the change by rounding a leaf may differ."""

DECIDED_BY_ROUNDING = 0.1
"""A leaf that rounding moves by more is not compared to any use."""
