"""How arrays lie in the memory of TPUs, and what a plan makes larger for it.

In: nothing. Out: numbers, each with its unit and its reason.
"""

from fractions import Fraction

TPU_TILE = 8, 128
"""Rows and columns of a TPU's tile: a shard that does not fill tiles is padded on the
wire. 50304 rows over 8 devices, 6288 each, were 6384."""

TILED_BYTES = 2**24
"""Of a sum whose parts a plan pads to tiles, at most: padding copies it. Of the 92 MB
of a Llama's MLP, in each layer, that takes longer than the two permutations by which
libtpu does without it; of 4 MB it does not, where there are 18."""

PIECES_DEVICES = 64
"""Of a v5p slice that may be four long in each direction; fewer scatter any rows."""

PIECES_MOST = 1700
"""Devices times the largest prime factor of a row's tiles, up to which libtpu (0.0.42,
0.0.50) reduce-scatters rows over such a slice: 23 x 64 and 13 x 128, not 29 x 64."""

PIECES_PADDING = Fraction(1, 8)
"""The most that rows are padded for that, as a part of them."""
