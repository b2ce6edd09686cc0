"""In: the package as type checkers see it. Out: the types of what `fully_shard` is."""

import re
import subprocess
import sys
from importlib.resources import files

import pytest

USES = """
import jax
import shardfn

mesh = jax.make_mesh((1,), ("data",))

def train_step(state, batch):
    return state, batch

@shardfn.fully_shard(mesh=mesh, min_size=0)
def decorated(state, batch):
    return state, batch

@shardfn.fully_shard(axis="data")
def local(state, batch):
    return state, batch

class Trainer:
    @shardfn.fully_shard(mesh=mesh)
    def step(self, state, batch):
        return state, batch

reveal_type(shardfn.fully_shard(train_step, mesh))
reveal_type(decorated)
reveal_type(shardfn.fully_shard(train_step))
reveal_type(local)
reveal_type(Trainer().step)
"""


def test_the_package_is_typed() -> None:
    assert files("shardfn").joinpath("py.typed").is_file()


def test_types_of_steps(tmp_path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    types = re.findall(r'information: Type of ".*" is "(\w+)"', done.stdout)
    expected = ["ShardedStep", "ShardedStep", "LocalStep", "LocalStep", "ShardedStep"]
    assert types == expected, done.stdout + done.stderr
