"""Thresholds that decide what a plan does, each with its unit and its reason."""

LOOP_BYTES = 2**26
"""What a loop may hold whole unless the user said otherwise, in bytes: the sums it
carries unreduced and, by themselves, the weights that all of its iterations share."""
