"""Eight CPU devices and strict dtypes in every test; the shared `integers` fixture.

This file is read before any test imports JAX, whose devices cannot change once made.
"""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# An installed libtpu or CUDA plugin compiles (the `aot` tests) but never runs: JAX must
# not look for its hardware, and may load it in both processes of pytest-xdist.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

# In place of flags of the caller's shell, which would change the programs that tests
# read: a module of machine code for each program, in parts no smaller than it. It is
# compiled in a third of the time on jax 0.10, whose fusions can do without modules too.
os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1" + (
    " --xla_cpu_use_fusion_emitters=false" * version("jax").startswith("0.10.")
)

from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
import tiers

from shardfn.analysis import targets

jax.config.update("jax_num_cpu_devices", 8)
# The persistent compilation cache stays off: a test that reads compiled programs has
# to read what this JAX compiles now, with its own names. One for a single run would
# have other tests' names, and cannot read what it keeps for GPUs and TPUs.
jax.config.update("jax_enable_compilation_cache", False)

# What is collected stays to the end, and traces make objects by the hundred thousand:
# looking through all of them for cycles took a tenth of the time.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` takes its choice."""
    tiers.mark_exhaustive(items)
    tiers.quick_first(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that is marked `aot(target)` where that compiler is missing, and an
    exhaustive one that no time is left for."""
    if reason := tiers.out_of_time(item):
        pytest.skip(reason)
    for mark in item.iter_markers("aot"):
        (target,) = mark.args
        if reason := targets.missing(target):
            pytest.skip(reason)


MOST_MAPPINGS = 20_000
"""Of memory, in one process. Linux allows 65,530 (`vm.max_map_count`), and each
function that LLVM compiles takes three: a process that asks for more ends without a
word."""

TESTS_BETWEEN = 10
"""Counting them takes 20 ms where there are as many as that."""

RUN = pytest.StashKey[int]()
"""How many tests have run."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets go of compiled programs where memory is mapped in too many pieces."""
    item.session.stash[RUN] = run = item.session.stash.get(RUN, 0) + 1
    if run % TESTS_BETWEEN == 0 and _mappings() > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _mappings() -> int:
    """In how many pieces this process has mapped its memory; 0 if that is not known."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@pytest.fixture(autouse=True)
def quick_compiles(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Asks LLVM for little, here and in processes that the test starts: most programs
    compile longer than they run. Not in tests marked `optimized`, nor in those of
    compilers of other machines."""
    if any(map(request.node.get_closest_marker, ("aot", "optimized"))):
        yield
        return
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def dtype_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strict, except in tests marked `standard_promotion`.

    Optax's Adam and Flax's LayerNorm themselves mix dtypes, so a test that runs them
    carries that mark: on a function, or on a module by `pytestmark`.
    """
    marked = request.node.get_closest_marker("standard_promotion")
    with jax.numpy_dtype_promotion("standard" if marked else "strict"):
        yield


@pytest.fixture
def integers() -> Callable[..., jax.Array]:
    """Returns `make(shape, low=-4, high=4)`: float32 arrays of small random integers.

    Their sums are exact in any order, so results compare with `==`. The arrays of one
    test differ from each other and are the same in every run. Arrays of nothing but
    zeros are refused: on zeros a wrong rule looks right.
    """
    rng = np.random.default_rng(0)

    def make(shape: tuple[int, ...], low: int = -4, high: int = 4) -> jax.Array:
        if 0 in shape or low == high == 0:
            raise ValueError(
                f"integers({shape}, low={low}, high={high}) can only be all zero, and "
                "a wrong rule is right on zeros. Give a non-empty shape and a range."
            )
        values = np.zeros(shape)
        while not values.any():
            values = rng.integers(low, high, shape, endpoint=True)
        return jax.numpy.asarray(values, dtype=jax.numpy.float32)

    return make
