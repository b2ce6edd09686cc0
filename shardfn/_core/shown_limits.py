"""How much is shown of what is long, where something is listed, printed or drawn.

In: nothing. Out: numbers, each with its unit. None of them changes a plan.
"""

SHOWN_LEAVES = 8
"""Leaves that a message names before it counts the others."""

SHOWN_MATCHES = 20
"""The same where a pattern matches none of them."""

SHOWN_NAMES = 4
"""Names that are written out of those of a value that joins several leaves."""

SHOWN_LINES = 40
"""Lines of the difference between two processes' programs."""

SHOWN_STATIC = 80
"""Characters of static data, before and after a step has changed it."""

SHOWN_VALUE = 80
"""The same of a wrong value of an option."""

SHOWN_ARRAY_BYTES = 64
"""Of a captured array that a listing shows."""

PRINTED_BYTES = 2**20
"""From which on the values of a stored leaf are not printed: that gathers it."""

PAGE_LEAVES = 60
"""Leaves that a report's page lists one by one; the others are summed up."""

PAGE_POINTS = 1500
"""Points of the page's curve of memory."""

DOC_WIDTH = 84
"""Characters in a line of `fully_shard`'s docstring."""
