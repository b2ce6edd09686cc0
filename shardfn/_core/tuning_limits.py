"""What tuning tries, and what reports advise.

In: nothing. Out: numbers, each with its unit and its reason. None of them changes a
plan by itself.
"""

TUNED_COMPILATIONS = 8
"""Programs that tuning compiles at most by default: seconds each for GPUs, a minute or
more for TPUs."""

TUNED_SHARE = 0.005
"""The part of a step that options have to save to be chosen: less is within what the
prediction leaves out."""

ADVISED_SHARE = 0.03
"""The part of a step that an option may save for a report to name it."""

ADVISED = 2
"""Options that a report names at most."""
