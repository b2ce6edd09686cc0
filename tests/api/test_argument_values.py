"""In: arguments of public functions that are of another kind than they take. Out: an
error that names the function, the argument, its value, the user's line, and what to
pass. `test_bad_input` has the options of `fully_shard`.
"""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_and_plain import make_mesh

import shardfn
from shardfn.analysis import compare, targets
from shardfn.storage.checkpoint import CheckpointError, Checkpoints
from shardfn.storage.safetensors import (
    ExportError,
    dotted,
    load_safetensors,
    write_safetensors,
)
from shardfn.testing import assert_parity, assert_same

W = np.ones((16, 16), np.float32)
X = np.ones((8, 16), np.float32)
WRONG = (None, "x", -1, 1.5, True, [1], {"a": 1}, {1}, object(), len, b"x", np.nan)


def train(w, x):
    return w - 0.1 * (x.T @ (x @ w)), x.sum()


def mesh() -> jax.sharding.Mesh:
    return make_mesh("4")


def step() -> shardfn.ShardedStep:
    return shardfn.fully_shard(train, mesh(), min_size=0)


def local() -> shardfn.LocalStep:
    return shardfn.fully_shard(train, min_size=0)


def parity(**given) -> None:
    assert_parity(train, given.pop("mesh", mesh()), W, X, **given)


def quantized() -> shardfn.QuantizedLeaf:
    return shardfn.quantize_leaves({"w": W}, {"w": "int8"}, block=8)["w"]


def is_count(least: int) -> Callable:
    return lambda x: type(x) is int and x >= least


def is_none(x) -> bool:
    return x is None


def is_text(x) -> bool:
    return isinstance(x, str)


def is_mapping(x) -> bool:
    return isinstance(x, dict)


def never(x) -> bool:
    return False


def either(*kinds: Callable) -> Callable:
    return lambda x: any(kind(x) for kind in kinds)


CASES = [
    # function, argument, the call, which of WRONG are right, what to pass
    ("assert_parity", "mesh", lambda x: parity(mesh=x), never, "Pass a mesh, such"),
    ("assert_parity", "steps", lambda x: parity(steps=x), never, "Pass a whole number"),
    ("assert_parity", "tol", lambda x: parity(tol=x), lambda x: x == 1.5,
     "Pass a number that is not negative, such as 1e-5."),
    ("assert_parity", "ignore", lambda x: parity(ignore=x), never,
     "Pass a tuple of regular expressions, each a string, such as"),
    ("assert_same", "tol", lambda x: assert_same(W, W, "here", tol=x),
     lambda x: x == 1.5, "Pass a number that is not negative"),
    ("assert_same", "ignore", lambda x: assert_same(W, W, "here", ignore=x), never,
     "Pass a tuple of regular expressions"),
    ("assert_same", "stored", lambda x: assert_same(W, W, "here", stored=x),
     either(is_none, is_mapping), "Pass a mapping, such as a dictionary, or None."),
    ("explain", "pattern", lambda x: step().plan(W, X).explain(x), is_text,
     "Pass the path of a leaf or subtree"),
    ("verify", "compiled", lambda x: step().plan(W, X).verify(x), is_text,
     "Pass step.lower(...).compile(), or its text in HLO."),
    ("target", "name", targets.target, is_text, "Pass a string."),
    ("devices", "name", targets.devices, is_text, "Pass a string."),
    ("target", "name", targets.missing, is_text, "Pass a string."),
    ("target", "name", lambda x: step().on(x, W, X), is_text, "Pass a string."),
    ("mesh", "axis_names", lambda x: targets.mesh("h100:8", x), never,
     "Pass a tuple of names, such as ('data',)."),
    ("mesh", "shape", lambda x: targets.mesh("h100:8", ("data",), x),
     lambda x: x is None or x == [1],
     "Pass a tuple of whole numbers of 1 or more, such as (2, 4), or None."),
    ("compare", "reports", compare, never, "Pass what step.on(...) returns, by name"),
    ("compare", "reports", lambda x: compare({"a": x}), never, "Pass what step.on"),
    ("tune", "memory", lambda x: shardfn.tune(step(), "h100:8", W, X, memory=x),
     either(is_none, is_text), "Pass bytes as a whole number, or a text such as '70"),
    ("tune", "compilations",
     lambda x: shardfn.tune(step(), "h100:8", W, X, compilations=x),
     lambda x: x == -1 and x is not True, "Pass a whole number."),
    ("tune", "progress", lambda x: shardfn.tune(step(), "h100:8", W, X, progress=x),
     callable, "Pass a function."),
    ("dequantize", "dtype", lambda x: quantized().dequantize(x), is_none,
     "Pass a dtype, such as jnp.bfloat16, or None."),
    ("quantize_leaves", "dtypes", lambda x: shardfn.quantize_leaves({"a": W}, x),
     is_mapping, "Pass a mapping, such as a dictionary."),
    ("quantize_leaves", "block",
     lambda x: shardfn.quantize_leaves({"a": W}, {"a": "int8"}, block=x), never,
     "Pass a whole number of 1 or more."),
    ("constrain", "spec", lambda x: shardfn.constrain(W, x), never,
     "Pass a PartitionSpec of mesh axes, such as jax.P('data')."),
    ("zero_residuals", "mesh", lambda x: shardfn.zero_residuals({"w": W}, x, "data"),
     never, "Pass a mesh, such as"),
    ("zero_residuals", "axis", lambda x: shardfn.zero_residuals({"w": W}, mesh(), x),
     is_text, "Pass a string."),
    ("zero_residuals", "min_size",
     lambda x: shardfn.zero_residuals({"w": W}, mesh(), "data", min_size=x), is_none,
     "Pass a whole number that is not negative, or None."),
    ("specs", "mesh", lambda x: local().specs(W, x), never, "Pass a mesh, such as"),
    ("assert_processes_agree", "text",
     lambda x: shardfn.assert_processes_agree("it", x), is_text, "Pass a string."),
    ("assert_processes_agree", "group",
     lambda x: shardfn.assert_processes_agree("it", "x", x),
     lambda x: x is None or x == [1],
     "Pass a tuple of whole numbers of 0 or more, or None."),
    ("Checkpoints", "directory", Checkpoints, is_text, "Pass a path: a string, or"),
    ("Checkpoints", "step", lambda x: Checkpoints("/nowhere", x), is_none,
     "Pass the step that fully_shard made with a mesh, or None."),
    ("Checkpoints", "options", lambda x: Checkpoints("/nowhere", options=x), is_none,
     "Pass orbax.checkpoint.CheckpointManagerOptions, or None."),
    ("write_safetensors", "path", lambda x: write_safetensors(x, {"w": W}), is_text,
     "Pass a path: a string, or an object such as pathlib.Path."),
    ("write_safetensors", "step", lambda x: write_safetensors("/no", {"w": W}, x),
     is_none, "Pass the step that fully_shard made with a mesh, or None."),
    ("write_safetensors", "names",
     lambda x: write_safetensors("/no", {"w": W}, names=x), callable,
     "Pass a function."),
    ("write_safetensors", "metadata",
     lambda x: write_safetensors("/no", {"w": W}, metadata=x),
     either(is_none, is_mapping), "Pass a mapping, such as a dictionary, or None."),
    ("load_safetensors", "path", lambda x: load_safetensors(x, {"w": W}), is_text,
     "Pass a path: a string, or"),
    ("load_safetensors", "step", lambda x: load_safetensors("/no", {"w": W}, x),
     is_none, "Pass the step that fully_shard made with a mesh, or None."),
    ("load_safetensors", "names",
     lambda x: load_safetensors("/no", {"w": W}, names=x),
     either(is_none, is_mapping, callable),
     "Pass a mapping, such as a dictionary, or a function, or None."),
    ("load_safetensors", "allow_missing",
     lambda x: load_safetensors("/no", {"w": W}, allow_missing=x), is_text,
     "Pass a string, or a tuple of strings."),
    ("dotted", "path", dotted, is_text, "Pass a string."),
]  # fmt: skip


@pytest.mark.parametrize(
    "asker, name, call, is_right, advice", CASES, ids=lambda x: x if is_text(x) else ""
)
def test_a_wrong_argument_is_named(asker, name, call, is_right, advice) -> None:
    wrong = [x for x in WRONG if not is_right(x)]
    for value in wrong:
        with pytest.raises(shardfn.ShardingError) as raised:
            call(value)
        what, where, what_to_do = str(raised.value).splitlines()
        assert re.fullmatch(rf"{name} cannot be .+\.", what), value
        assert where.startswith(f"  {asker} was called at test_argument_values.py:")
        assert what_to_do.startswith(advice)


def test_right_arguments_of_other_types_are_taken(tmp_path: Path) -> None:
    assert_parity(
        train, mesh(), W, X, steps=np.int64(1), tol=np.float32(1e-4), ignore=["^$"]
    )
    assert_same(W, W, "here", tol=jnp.float32(1e-4), ignore=("^b$",), stored={})
    ignore = [re.compile("^W$", re.IGNORECASE), "^b$"]
    assert_same({"w": W}, {"w": W + 1}, "here", ignore=ignore)
    with pytest.raises(AssertionError, match="w"):
        assert_same({"w": W}, {"w": W + 1}, "here", ignore=[re.compile("^W$")])
    with pytest.raises(shardfn.ShardingError, match="^ignore cannot be"):
        assert_same(W, W, "here", ignore=[re.compile(b"^w$")])
    shardfn.constrain(W, jax.P(None, ("data",)))
    shardfn.constrain(W, jax.P(jax.P.UNCONSTRAINED))
    quantized().dequantize(jnp.bfloat16)
    shardfn.zero_residuals({"w": W, "n": 1.0}, mesh(), "data", min_size=np.int32(0))
    with Checkpoints(tmp_path, step()) as checkpoints:
        checkpoints.save(np.int64(3), step().shard(W), {"at": 1})
        assert checkpoints.restore(W, np.int64(3)).shape == W.shape


def test_a_wrong_number_of_a_checkpoint_harms_no_other(tmp_path: Path) -> None:
    """A number that is a text was saved, and then no number could be compared."""
    sharded = step()
    with Checkpoints(tmp_path, sharded) as checkpoints:
        for wrong in ("x", None, -1, 1.5, True, [1]):
            with pytest.raises(shardfn.ShardingError, match="^number cannot be") as one:
                checkpoints.save(wrong, sharded.shard(W))
            assert "  save was called at test_argument_values.py:" in str(one.value)
        for wrong in ("x", -1, 1.5, True, [1]):
            for name, call in {
                "restore": lambda x: checkpoints.restore(W, x),
                "extra": checkpoints.extra,
            }.items():
                with pytest.raises(
                    shardfn.ShardingError, match="^number cannot be"
                ) as one:
                    call(wrong)
                assert f"  {name} was called at test_arg" in str(one.value)
        for wrong in ("x", 1.5, [1]):
            with pytest.raises(shardfn.ShardingError, match="^extra cannot be"):
                checkpoints.save(1, sharded.shard(W), wrong)
        with pytest.raises(shardfn.ShardingError, match="^partial cannot be 'x'"):
            checkpoints.restore(W, partial="x")
        with pytest.raises(CheckpointError, match="^the state has no arrays, so that"):
            checkpoints.save(1, {})
        checkpoints.save(1, sharded.shard(W))
        assert checkpoints.restore(W).shape == W.shape


def test_names_that_a_function_makes_of_paths(tmp_path: Path) -> None:
    for wrong in (1, 1.5, b"x", ["x"], {"x": 1}):
        with pytest.raises(ExportError, match="^state leaf 'w' would be called"):
            write_safetensors(tmp_path / "x", {"w": W}, names=lambda _: wrong)  # noqa: B023


def test_leaves_that_are_no_arrays() -> None:
    with pytest.raises(shardfn.ShardingError, match="^leaf 'a' cannot be 1.5."):
        shardfn.quantize_leaves({"a": 1.5}, {"a": "int8"})
    with pytest.raises(shardfn.ShardingError, match="^params cannot be 'x'."):
        shardfn.zero_residuals({"a": "x"}, mesh(), "data")
    with pytest.raises(shardfn.ShardingError, match="^train_step cannot be None."):
        shardfn.tune(None, "h100:8", W, X)


def test_errors_name_what_was_called(tmp_path: Path) -> None:
    """Also where it is what they find of a state or a batch; a step by its name."""
    sharded, no_array, rows = step(), {"a": object()}, jnp.ones((9, 16))
    of_a_step = {
        "": lambda: sharded(W, rows),
        ".init": lambda: sharded.init(lambda: no_array),
        ".abstract": lambda: sharded.abstract(lambda: no_array),
        ".shard": lambda: sharded.shard(no_array),
        ".unshard": lambda: sharded.unshard(no_array),
        ".shardings": lambda: sharded.shardings(no_array),
        ".plan": lambda: sharded.plan(W, rows),
        ".lower": lambda: sharded.lower(W, rows),
        ".best_dimensions": lambda: sharded.best_dimensions(W, rows),
        ".on": lambda: sharded.on("h100:8", W, rows),
    }
    functions = {
        "fully_shard": lambda: shardfn.fully_shard(train, mesh(), shard_for=(W, rows)),
        "tune": lambda: shardfn.tune(train, "h100:8", W, rows),
        "assert_parity": lambda: assert_parity(train, mesh(), W, rows),
        "restore": lambda: Checkpoints(tmp_path, sharded).restore(no_array),
        "extra": lambda: Checkpoints(tmp_path, sharded).extra(),
        "save": lambda: Checkpoints(tmp_path, sharded).save(0, no_array),
        "write_safetensors": lambda: write_safetensors(tmp_path / "a", no_array),
        "load_safetensors": lambda: load_safetensors(tmp_path / "a", no_array),
    }
    methods = {f"train{name}": call for name, call in of_a_step.items()}
    for name, call in (methods | functions).items():
        with pytest.raises((shardfn.ShardingError, OSError)) as error:
            call()
        place = f"  {name} was called at test_argument_values.py:"
        assert place in str(error.value), name
