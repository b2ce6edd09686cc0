"""What tuning tries, and what reports advise.

In: nothing. Out: numbers, each with its unit and its reason. None of them changes a
plan by itself.
"""

TUNED_COMPILATIONS = 8
"""Programs that tuning compiles at most by default: seconds each for GPUs, a minute or
more for TPUs."""

LEAST_MEMORY = 2**20
"""Bytes of memory below which a bound is a number without its unit: the code of a step
alone takes more."""

TUNED_SHARE = 0.005
"""The part of a step that options have to save to be chosen: less is within what the
prediction leaves out."""

REPLICAS_LATENCY = 0.6
"""The part of transfers that is latency from which on a mesh with replicas is advised:
T5-11B on 512 H100s, 0.67 of whose transfers are latency, then takes 6% to 8% less time;
Llama-7B on 64, 0.50, takes 4% to 5% more."""

REPLICAS_STATE = 2
"""Bytes that a mesh with replicas is taken to need more, for each more of the state:
gradients are split like it, too."""

ADVISED_SHARE = 0.03
"""The part of a step that an option may save for a report to name it."""

ADVISED = 2
"""Options that a report names at most."""
