"""Schedule passes: each rewrites a plan into a plan that moves the same values better."""

from shardfn._plan import BodyPlan
from shardfn._program import Program
from shardfn._sharding import Axes


def schedule(program: Program, body: BodyPlan, axes: Axes) -> BodyPlan:
    """Runs all passes in order."""
    return body
