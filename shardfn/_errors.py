"""Error and warning types, and where in the user's code something happened."""

import os

from jax.extend.core import JaxprEqn

from shardfn import _compat


class ShardingError(ValueError):
    """The step, its state or its batch cannot be sharded as asked."""


class UnsupportedPrimitiveWarning(UserWarning):
    """A primitive has no op sharding rule and runs on gathered operands."""


def _shorten(place: str) -> str:
    return os.path.basename(place) if place.startswith(os.sep) else place


def where(eqn: JaxprEqn) -> str:
    """The user's line that made `eqn`, such as `train.py:41 (loss_fn)`."""
    place = _shorten(_compat.summarize(eqn))
    if ":" not in place:
        return f"an unknown line ({eqn.primitive.name})"
    file, _, rest = place.partition(":")
    line, _, tail = rest.partition(":")
    function = tail.partition(" ")[2] or rest.partition(" ")[2]
    return f"{file}:{line.split(' ')[0]} {function}".strip()


def call_site() -> str:
    """The user's line that is calling shardfn, such as `train.py:88 (main)`."""
    return _shorten(_compat.caller())
