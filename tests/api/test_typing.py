"""In: the package as type checkers see it. Out: the types of what `fully_shard` is."""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

USES = """
from typing import Any, NamedTuple

import jax
import shardfn

mesh = jax.make_mesh((1,), ("data",))

class State(NamedTuple):
    w: jax.Array

class Loss(NamedTuple):
    value: jax.Array

def create(key: jax.Array, size: int = 8) -> State:
    return State(jax.random.normal(key, (size,)))

def train_step(state: State, batch: jax.Array) -> tuple[State, Loss]:
    return state, Loss(batch.sum())

@shardfn.fully_shard(mesh=mesh, min_size=0)
def decorated(state: State, batch: jax.Array) -> tuple[State, Loss]:
    return state, Loss(batch.sum())

@shardfn.fully_shard(axis="data")
def local(state: State, batch: jax.Array) -> tuple[State, Loss]:
    return state, Loss(batch.sum())

@shardfn.fully_shard(mesh=mesh)
def untyped(state, batch):
    return state, batch

class Trainer:
    @shardfn.fully_shard(mesh=mesh)
    def step(self, state: State, batch: jax.Array) -> tuple[State, Loss]:
        return state, Loss(batch.sum())

step = shardfn.fully_shard(train_step, mesh)
key, x = jax.random.key(0), jax.numpy.ones(8)
options: dict[str, Any] = {}
shardfn.fully_shard(train_step, mesh, prefetch={"a/*": 1}, shard=False)
shardfn.fully_shard(train_step, mesh, prefetch={"a/*": 1, "*": "first"})
reveal_type(step)
reveal_type(decorated)
reveal_type(Trainer().step)
reveal_type(local)
reveal_type(shardfn.fully_shard(train_step))
reveal_type(shardfn.fully_shard(train_step, mesh, **options))
reveal_type(untyped)
reveal_type(step(State(x), x)[0])
reveal_type(decorated(State(x), batch=x)[1])
reveal_type(Trainer().step(State(x), x)[0])
reveal_type(local(State(x), x)[0])
reveal_type(step.init(create, key))
reveal_type(step.init(lambda: {"w": 1}))
reveal_type(step.abstract(create, key))
reveal_type(step.shard(State(x)))
reveal_type(step.unshard(State(x)))
reveal_type(step.unshard(State(x), process=0))
reveal_type(step.plan(State(x), jax.ShapeDtypeStruct((8,), "float32")).notes)
"""
CALLED = "ShardedStep[(state: State, batch: Array), tuple[State, Loss]]"
TYPES = [
    *[CALLED] * 3,
    *["LocalStep[(state: State, batch: Array), tuple[State, Loss]]"] * 2,
    CALLED,
    "ShardedStep[(state: Unknown, batch: Unknown), tuple[Unknown, Unknown]]",
    *["State", "Loss", "State", "State"],
    *["State", "dict[str, int]", "State", "State", "State", "State | None"],
    "tuple[str, ...]",
]

WRONG = """
step(State(x))
step(State(x), batch=1)
decorated(x, State(x))
Trainer().step(State(x))
shardfn.fully_shard(train_step, mesh, prefech=1)
shardfn.fully_shard(train_step, mesh, accumulate="sometimes")
shardfn.fully_shard(mesh=mesh, bucket_bytes="64")
"""


def checked(folder: Path, text: str) -> str:
    """What pyright prints for a file."""
    pytest.importorskip("pyright")
    (folder / "uses.py").write_text(text)
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_package_is_typed() -> None:
    assert files("shardfn").joinpath("py.typed").is_file()


def test_types_of_steps_and_of_what_they_return(tmp_path) -> None:
    printed = checked(tmp_path, USES + WRONG)
    assert re.findall(r'information: Type of ".*" is "(.*)"', printed) == TYPES, printed
    first, errors = len(USES.splitlines()), re.findall(r":(\d+):\d+ - error", printed)
    wrong = [first + 1 + i for i, line in enumerate(WRONG.splitlines()) if line]
    assert sorted(set(map(int, errors))) == wrong, printed
