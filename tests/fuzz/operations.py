"""All operations of the language: `TABLE`, and what each runs, `RUN`."""

import contracting as contracting
import control_flow as control_flow
import pointwise as pointwise
import shaping as shaping
from registry import TABLE as TABLE

RUN = {name: op.run for name, op in TABLE.items()}
