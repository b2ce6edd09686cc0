"""Small texts and a small run. `train`, `config`, `data` and so on are the modules of
examples/lm_pretrain.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from config import Config, DataConfig, LogConfig, ModelConfig

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
