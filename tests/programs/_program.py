"""In: functions that build a `Program`, a plain training step for one device.
Out: a registry of them by name; `get(name)` builds one, once.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Tree = Any
FLOAT32_TOL = 1e-5
# A bfloat16 sum in another order moves a gradient by 1 to 2% here, and both are 1 to
# 3% from the gradient in float32; Adam's second moment squares that.
BFLOAT16_TOL = 6e-2


@dataclass(frozen=True, slots=True)
class Noisy:
    """Leaves of the state that rounding decides; `pattern` is searched in the path."""

    pattern: str
    reason: str


@dataclass(frozen=True, slots=True)
class Program:
    """A plain step and what it needs to run.

    Args:
      name: name in the registry.
      init: pure function from a key to the whole state.
      step: pure function `(state, batch) -> (state, metrics)`; `metrics["loss"]` is
        a scalar.
      batch: function from a seed to a batch, host arrays of 16 rows.
      tol: largest relative norm of the difference of a floating-point leaf.
      noisy: leaves of the state that are not compared; the program puts their
        gradients into its metrics instead.
      batch_spec: given to `fully_shard` as it is.
      gathers: whether the step does something along the batch that has no local
        form (sort, cumsum, each row against all), so that values as large as the batch
        are moved and `fully_shard` may warn about their cost.
    """

    name: str
    init: Callable[[jax.Array], Tree]
    step: Callable[[Tree, Tree], tuple[Tree, Tree]]
    batch: Callable[[int], Tree]
    tol: float = FLOAT32_TOL
    noisy: tuple[Noisy, ...] = ()
    batch_spec: Tree = None
    gathers: bool = False


_BUILDERS: dict[str, Callable[[], Program]] = {}


def register(name: str, *, needs: str | None = None):
    """Decorates a function that returns a program without its name.

    Args:
      name: the program's name.
      needs: a package that may be missing; then the program is not registered.
    """

    def decorate(build: Callable[[], Program]) -> Callable[[], Program]:
        assert name not in _BUILDERS, f"two programs are called {name!r}"
        if needs is None or importlib.util.find_spec(needs) is not None:
            _BUILDERS[name] = build
        return build

    return decorate


def names() -> list[str]:
    """The names of all programs, in the order of their registration."""
    return list(_BUILDERS)


@functools.cache
def get(name: str) -> Program:
    """The program called `name`; the same object at every call."""
    program = _BUILDERS[name]()
    assert program.name == name, (program.name, name)
    return program
