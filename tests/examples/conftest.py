"""Small texts and a small run. `train`, `config`, `data` and so on are the modules of
examples/lm_pretrain.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from config import Config, DataConfig, LogConfig, ModelConfig
from jax.experimental.compilation_cache import compilation_cache

Write = Callable[[str, bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file in the test's folder; returns its path."""

    def write(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.fixture
def text(write: Write) -> str:
    """A file of a few hundred different sentences."""
    lines = (f"Line {i} is not line {i * i}.\n\n" for i in range(800))
    return write("text.txt", "".join(lines).encode())


@pytest.fixture
def tiny(tmp_path: Path, text: str) -> Config:
    """Three steps of a model of two layers."""
    return Config(
        run_dir=str(tmp_path / "run"),
        steps=3,
        save_every=0,
        batch_size=8,
        data=DataConfig(files=(text,)),
        model=ModelConfig(layers=2, width=64, heads=4, mlp_width=128, context=32),
        log=LogConfig(plot=False),
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs that go on, or in other processes, take what one before them has compiled:
    they are about what is saved and printed."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    names = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        jax.config.update(
            "jax_compilation_cache_dir", names["JAX_COMPILATION_CACHE_DIR"]
        )
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()  # JAX asks once whether there is one
        yield
        jax.config.update("jax_enable_compilation_cache", False)
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
