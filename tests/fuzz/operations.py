"""All operations of the language: `TABLE`, and what each runs, `RUN`."""

import contracting as contracting
import control_flow as control_flow
import integers as integers
import neighbours as neighbours
import pointwise as pointwise
import shaping as shaping
from registry import TABLE as TABLE

RUN = {name: op.run for name, op in TABLE.items()}

THEMES = {
    module.__name__: tuple(
        name for name, run in RUN.items() if run.__module__ == module.__name__
    )
    for module in (contracting, control_flow, integers, neighbours, pointwise, shaping)
}
"""The operations that each module defines; JAX's own are in none."""
