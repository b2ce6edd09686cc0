"""In: programs that are warned of. Out: each warning points at the user's line that
called shardfn, so that filters of a module, and Python's own text, are of that.
"""

import ast
import functools
import linecache
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType

import shardfn
from shardfn.storage.checkpoint import Checkpoints
from shardfn.testing import assert_parity

ROOT = Path(shardfn.__file__).parent
MESH = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
W = np.ones((64, 64), np.float32)
X = np.ones((8, 64), np.float32)

opaque_p = Primitive("opaque_for_warnings")
opaque_p.def_abstract_eval(lambda x: x)
opaque_p.def_impl(lambda x: x)
mlir.register_lowering(opaque_p, lambda ctx, x: [x])


def opaque(w, x):
    return w * 2.0, opaque_p.bind(x @ w).sum()


def plain(w, x):
    return w * 2.0, (x @ w).sum()


def repeated(w, key):
    x = jax.random.normal(key, (1024, 1024))
    return w, (x @ x @ x).sum()


def sign(state, x):
    grad = jax.grad(lambda w: jnp.tanh(x @ w).sum())(state)
    return state - jnp.sign(grad), x.sum()


def fed(state, x):
    w, residual = state
    grad = jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)
    grad, residual = shardfn.error_feedback(grad, residual)
    return (w - grad, residual), x.sum()


def sharded(fn: Callable, sizes: tuple[int, ...] = (4,), names=("data",), **options):
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, names, devices=devices)
    return shardfn.fully_shard(fn, mesh, **{"min_size": 0, **options})


def unsupported() -> None:
    sharded(opaque)(W, X)  # here


def unsupported_plan() -> None:
    sharded(opaque).plan(W, X)  # here


def unsupported_lower() -> None:
    sharded(opaque).lower(W, X)  # here


def unsupported_by_name() -> None:
    step = functools.partial(sharded(opaque), W)
    step(x=X)  # here


def unsupported_inside_jit() -> None:
    step = sharded(opaque)
    run = jax.jit(lambda w, x: step(w, x))  # here
    run(W, X)


def unsupported_inside_shard_map() -> None:
    local = shardfn.fully_shard(opaque, min_size=0)

    def run(w, x):
        return local(local.shard(w), x)[1]  # here

    out, rows = jax.P(), jax.P("data")
    jax.eval_shape(
        jax.shard_map(run, mesh=MESH, in_specs=(out, rows), out_specs=out), W, X
    )


def unused_axis() -> None:
    sharded(plain, (2, 2), ("data", "model"))(W, X)  # here


def replicated() -> None:
    sharded(repeated).plan(W, jax.random.key(0))  # here


def inexact_sign() -> None:
    step = sharded(sign, reduce_dtype={"state": "int8"}, quantize_block=8)
    step.plan(W, X)  # here


def offload() -> None:
    sharded(plain, offload="1KiB")(W, X)  # here


def static() -> None:
    step = sharded(lambda w, batch: (w + 1, batch["x"].sum()))
    for i in range(11):
        step(W, {"x": X, "text": f"row {i}"})  # here


def residual() -> None:
    state = W, shardfn.zero_residuals(W, MESH, "data", min_size=0)
    shardfn.fully_shard(fed, MESH, min_size=0).plan(state, X)  # here


def missing_residual(folder: Path) -> None:
    state = W, shardfn.zero_residuals(W, MESH, "data", min_size=0)
    step = shardfn.fully_shard(fed, MESH, min_size=0)
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.save(1, (W, None))
        checkpoints.restore(state)  # here


def decided_by_rounding() -> None:
    def step(state, x):
        """The true gradient of the bias is zero."""

        def loss(state):
            y = x @ state["w"] + state["b"]
            return jnp.square(jnp.tanh(y - y.mean(0))).sum()

        grad = jax.grad(loss)(state)
        return jax.tree.map(lambda w, g: w - jnp.sign(g), state, grad), x.sum()

    key = jax.random.key(0)
    state = {"w": jax.random.normal(key, (64, 64)), "b": jnp.zeros(64)}
    rows = jax.random.normal(key, (8, 64))
    assert_parity(step, MESH, state, rows, steps=1)  # here


@pytest.mark.parametrize(
    "program, category",
    [
        (unsupported, shardfn.UnsupportedPrimitiveWarning),
        (unsupported_plan, shardfn.UnsupportedPrimitiveWarning),
        (unsupported_lower, shardfn.UnsupportedPrimitiveWarning),
        (unsupported_by_name, shardfn.UnsupportedPrimitiveWarning),
        (unsupported_inside_jit, shardfn.UnsupportedPrimitiveWarning),
        (unsupported_inside_shard_map, shardfn.UnsupportedPrimitiveWarning),
        (unused_axis, shardfn.UnusedAxisWarning),
        (replicated, shardfn.ReplicatedComputeWarning),
        (inexact_sign, shardfn.InexactSignWarning),
        (offload, shardfn.OffloadWarning),
        (static, shardfn.StaticArgumentWarning),
        (residual, shardfn.ResidualWarning),
        (missing_residual, shardfn.ResidualWarning),
        (decided_by_rounding, UserWarning),
    ],
)
def test_a_warning_points_at_the_user_s_line(program, category, tmp_path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program(*([tmp_path] if program is missing_residual else []))
    found = [each for each in caught if each.category is category]
    assert found, [str(each.message) for each in caught]
    for each in found:
        assert each.filename == __file__, f"{each.filename}:{each.lineno}"
        assert "# here" in linecache.getline(__file__, each.lineno)


def test_a_filter_of_the_user_s_module_is_of_their_warnings() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=__name__)
        unsupported_plan()
    assert caught == []


def test_no_module_counts_frames() -> None:
    """They all warn through `errors.warn`, which looks for the user's line."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_warn = isinstance(node, ast.Attribute) and node.attr == "warn"
            if is_warn and path.relative_to(ROOT).as_posix() != "_core/errors.py":
                found.append(f"{path}:{node.lineno}")
    assert found == []
