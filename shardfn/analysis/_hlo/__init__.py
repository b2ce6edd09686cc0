"""Reads compiled programs: what XLA made of a step.

In: the text of an optimized HLO module, for CPU, GPU or TPU. Out: the collectives that
it runs (`collectives`), and when its operations would run at best (`play`).
"""

from shardfn.analysis._hlo.collective import HloCollective as HloCollective
from shardfn.analysis._hlo.collectives import (
    overlapped_bytes as overlapped_bytes,
    read_collectives as read_collectives,
    tally as tally,
    wire_bytes as wire_bytes,
)
