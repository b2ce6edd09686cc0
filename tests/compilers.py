"""A parameter of a test that compiles for devices which are not there."""

from typing import Any

import pytest


def aot(target: str, *values: Any, exhaustive: bool = False) -> Any:
    """`target` and what goes with it; skipped, and listed, without its compiler."""
    marks = [pytest.mark.aot(target)] + [pytest.mark.exhaustive] * exhaustive
    return pytest.param(target, *values, marks=marks)
