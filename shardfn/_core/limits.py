"""Thresholds that decide what a plan does, each with its unit and its reason."""

LOOP_BYTES = 2**26
"""What a loop may hold whole unless the user said otherwise, in bytes: the sums it
carries unreduced and, by themselves, the weights that all of its iterations share."""

REPLICATED_SHARE = 0.5
"""The part of a device's FLOPs from which on a plan says that they are the same on
every device: then more devices can make the step at most twice as fast."""

REPLICATED_FLOPS = 2**30
"""How many of them there have to be for a warning, too: fewer take microseconds."""

BATCH_KINDS = 64
"""For how many structures and shapes of batches a step keeps what it has planned and
compiled, the last used: a program takes megabytes, and compiling it again seconds to
minutes. Lengths in buckets are fewer; as many as there are lengths are no cache."""
