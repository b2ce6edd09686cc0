"""Where a program runs: meshes, and settings of JAX.

In: their names in a `Program`. Out: a mesh with the arguments of `fully_shard` that go
with it, and a context.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@dataclass(frozen=True)
class Layout:
    """A mesh: sizes, names and types of its axes, and over which the step is split."""

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ("data",)
    types: tuple[AxisType, ...] = (EXPLICIT,)
    axis: Any = "data"

    @property
    def mesh(self) -> Mesh:
        devices = jax.devices()[: self.devices]
        return jax.make_mesh(self.sizes, self.names, self.types, devices=devices)

    @property
    def devices(self) -> int:
        out = 1
        for n in self.sizes:
            out *= n
        return out

    @property
    def divides(self) -> int:
        """Into how many parts rows are split."""
        return self.devices if isinstance(self.axis, tuple) else self.sizes[0]


def _hybrid(sizes: tuple[int, int], type_: AxisType) -> Layout:
    names = ("replica", "data")
    return Layout(sizes, names, (type_, type_), names)


MESHES = {
    "1": Layout((1,)),
    "2": Layout((2,)),
    "3": Layout((3,)),
    "4": Layout((4,)),
    "8": Layout((8,)),
    "4-auto": Layout((4,), types=(AUTO,)),
    "2x2": _hybrid((2, 2), AUTO),
    "2x4": _hybrid((2, 4), EXPLICIT),
    "3x2": _hybrid((3, 2), AUTO),
    "2-model": Layout((2, 2), ("data", "model"), (AUTO, AUTO)),
    "4-model": Layout((4, 2), ("data", "model"), (EXPLICIT, AUTO)),
}


@contextlib.contextmanager
def _wide() -> Iterator[None]:
    """64 bits; the language then mixes dtypes."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


SETTINGS: dict[str, Any] = {
    "": contextlib.nullcontext,
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "leaks": jax.checking_leaks,
    "nans": lambda: jax.debug_nans(True),
    "x64": _wide,
}

AS_THE_USER: dict[str, Any] = {"ranks": lambda: jax.numpy_rank_promotion("allow")}
"""What the user's own code needs under a setting, which is then asked of the library
alone."""
