"""A parameter of a test that compiles for devices which are not there."""

from typing import Any

import pytest


def aot(target: str, *values: Any) -> Any:
    """`target` and what goes with it; skipped, and listed, without its compiler."""
    return pytest.param(target, *values, marks=pytest.mark.aot(target))
