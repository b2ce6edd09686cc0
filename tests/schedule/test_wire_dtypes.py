"""In: steps in bfloat16 and float32, and the dtypes asked for on the wire. Out: moves
in these dtypes, and sums that are exact where their dtype is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from jax import lax
from plan_helpers import (
    assert_moves_hold,
    cpu_mesh,
    emitted_moves,
    planned_moves,
    shard,
    shard_fn,
    walk,
)
from sharded_and_plain import assert_parity, make_mesh

import shardfn

BFLOAT16 = jnp.bfloat16


def low(x: Any) -> Any:
    return x.astype(BFLOAT16)


def descend(loss_fn):
    """A step that subtracts the whole gradient."""

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), loss

    return step


def descend_if_finite(loss_fn):
    """The same, unless the gradient is not finite."""

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return lax.cond(
            jnp.isfinite(grads).all(), jnp.subtract, first, state, grads
        ), loss

    return step


def first(state, grads):
    return state


def product(w, x):
    return (low(x) @ low(w)).astype(jnp.float32).sum()


def transposed(w, x):
    return jnp.einsum("bd,fd->bf", low(x), low(w)).astype(jnp.float32).sum()


def scanned(w, x):
    def layer(total, w):
        return total + (low(x) @ low(w)).astype(jnp.float32).sum(), None

    return lax.scan(layer, jnp.zeros(()), w)[0]


CASES = {
    "product": (product, (2, 8)),
    "transposed": (transposed, (8, 2)),
    "scanned": (scanned, (3, 2, 8)),
}


def gradient(
    case: str, rows: list[float], make: Any = descend, **options: Any
) -> np.ndarray:
    """The gradient of one column, with two rows of `x` on each of two devices.

    XLA may drop a rounding to bfloat16 where it likes, and does on CPU: it is told not
    to, so that what is exact is so because the program says so.
    """
    loss_fn, shape = CASES[case]
    mesh = cpu_mesh(2)
    step = shardfn.fully_shard(make(loss_fn), mesh, min_size=2, **options)
    x = np.zeros((4, 2), np.float32)
    x[:, 0] = rows
    state = step.shard(jnp.zeros(shape))
    compiled = step.lower(state, x).compile({"xla_allow_excess_precision": False})
    new, _ = compiled([state], (jnp.asarray(x),))
    return -np.array(new).reshape(-1, *shape[-2:])[-1]


@pytest.mark.parametrize("case", CASES)
def test_float32_sums_of_bfloat16_gradients(case: str) -> None:
    """(256 + 1) + (-256 + 0) is 1, and 0 if a term is rounded before the sum."""
    rows = [256.0, 1.0, -256.0, 0.0]
    exact = gradient(case, rows, reduce_dtype="float32")
    rounded = gradient(case, rows)
    assert set(exact.ravel()) == {0.0, 1.0}
    assert set(rounded.ravel()) == {0.0}


@pytest.mark.parametrize("case", CASES)
def test_a_sum_that_a_branch_takes_is_wide(case: str) -> None:
    """As where an update is left out whose gradient is not finite."""
    rows = [256.0, 1.0, -256.0, 0.0]
    options = dict(make=descend_if_finite, reduce_dtype={"state": "float32"})
    assert set(gradient(case, rows, **options).ravel()) == {0.0, 1.0}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("outer", ["apply_if_finite", "MultiSteps"])
def test_gradients_that_optax_passes_to_a_branch(outer: str) -> None:
    """They go by the name of the parameter that they update behind it."""
    adam = optax.adam(0.1)
    optimizer = {
        "apply_if_finite": optax.apply_if_finite(adam, 3),
        "MultiSteps": optax.MultiSteps(adam, 2).gradient_transformation(),
    }[outer]

    def step(state, x):
        params, moments = state
        loss, grads = jax.value_and_grad(product)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = jnp.zeros((16, 8))
    state = params, optimizer.init(params)
    options = dict(min_size=64, reduce_dtype={"0": "float32"})
    sharded = shardfn.fully_shard(step, cpu_mesh(4), **options)
    plan = sharded.plan(state, jnp.zeros((8, 16)))
    assert reductions(plan)["0"] == {"float32"}


@pytest.mark.parametrize("case", CASES)
def test_a_float32_sum_is_not_rounded_behind_it(case: str) -> None:
    """257 has no bfloat16; the step casts the gradient to float32 anyway."""
    rows = [256.0, 0.0, 1.0, 0.0]
    assert gradient(case, rows, reduce_dtype="float32").max() == 257
    assert gradient(case, rows).max() == 256


def reductions(plan: shardfn.Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in plan.collectives:
        if line.op in ("psum_scatter", "all_reduce") and line.path:
            found.setdefault(line.path, set()).add(line.dtype)
    return found


@pytest.mark.standard_promotion
def test_gradients_of_a_transformer_by_pattern() -> None:
    wide = "params/layers/*/kernel"
    case = shard(
        programs.get("gpt_scan_remat_bf16"),
        cpu_mesh(4),
        min_size=8,
        reduce_dtype={wide: "float32"},
        # The CPU backend of jax 0.10 merges repeated gathers outside of loops.
        reshard_after_forward={"params/norm": False},
    )
    found = reductions(case.plan)
    kernels = {path for path in found if "layers" in path and "kernel" in path}
    assert len(kernels) == 6
    for path, dtypes in found.items():
        norm = "norm" in path.lower()
        assert dtypes == {"float32" if norm or path in kernels else "bfloat16"}, path
    assert_moves_hold(case)
    assert f"\nreduce_dtype: 'float32' for {wide}\n" in f"{case.plan}\n"


@pytest.mark.exhaustive
@pytest.mark.standard_promotion
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_parity_with_wide_sums(options) -> None:
    program = programs.get("gpt_tied_bf16")
    assert_parity(program, make_mesh("4"), reduce_dtype="float32", steps=2, **options)


def test_a_narrower_dtype_rounds_terms() -> None:
    def loss_fn(w, x):
        return (x @ w).sum()

    case = shard_fn(
        descend(loss_fn), cpu_mesh(4), (16, 8), (8, 16), reduce_dtype=BFLOAT16
    )
    assert reductions(case.plan) == {"state": {"bfloat16"}}
    x = np.full((8, 16), 1 + 2**-10, np.float32)
    state, _ = case.step(case.step.shard(jnp.zeros((16, 8))), x)
    assert set(np.array(case.step.unshard(state)).ravel()) == {-8.0}


# Gathers


def float32_layers(w, x):
    h = x
    for layer in w:
        h = jnp.tanh(h @ layer)
    return h.sum()


def test_gathers_in_a_narrower_dtype_by_pattern() -> None:
    shapes, options = [(16, 16), (16, 16)], dict(gather_dtype={"1": BFLOAT16})
    case = shard_fn(descend(float32_layers), cpu_mesh(4), shapes, (8, 16), **options)
    gathers = [c for c in case.plan.collectives if c.op == "all_gather"]
    found = {(c.path, c.dtype) for c in gathers}
    assert found == {("0", "float32"), ("1", "bfloat16")}


def test_gathers_in_a_narrower_dtype() -> None:
    shapes = [(16, 16), (16, 16)]
    cases = [
        shard_fn(
            descend(float32_layers), cpu_mesh(4), shapes, (8, 16), gather_dtype=dtype
        )
        for dtype in (None, BFLOAT16)
    ]
    plain, narrow = (case.plan for case in cases)
    gathers = [c for c in narrow.collectives if c.op == "all_gather"]
    assert gathers and {c.dtype for c in gathers} == {"bfloat16"}
    others = [c for c in narrow.collectives if c.op != "all_gather"]
    assert {c.dtype for c in others} == {"float32"}
    assert narrow.parameter_bytes * 2 == plain.parameter_bytes
    assert emitted_moves(cases[1]) == planned_moves(narrow)
    rng = np.random.default_rng(0)
    state = [rng.standard_normal(s).astype(np.float32) / 4 for s in shapes]
    rounded = [np.array(low(jnp.asarray(w)), np.float32) for w in state]
    x = rng.standard_normal((8, 16)).astype(np.float32)
    (exact, other), (got, loss) = (
        case.step(case.step.shard(given), x)
        for case, given in zip(cases, (rounded, state), strict=True)
    )
    assert loss == other, "as if the weights had been rounded"
    for w, r, a, b in zip(
        state, rounded, *map(cases[0].step.unshard, (exact, got)), strict=True
    ):
        np.testing.assert_allclose(w - np.array(b), r - np.array(a), atol=1e-6)


def once(w, loss_fn):
    return jax.value_and_grad(loss_fn)(w), jnp.sort(w, axis=0)


def by_layer(w, loss_fn):
    """The update goes through the layers, as the forward pass does."""

    def scanned(w):
        return lax.scan(lambda h, layer: (h + loss_fn(layer), None), 0.0, w)[0]

    made = jax.value_and_grad(scanned)(w)
    return made, lax.map(lambda layer: jnp.sort(layer, axis=0), w)


@pytest.mark.parametrize(
    "run, shape, options",
    [
        (once, (64, 64), {}),
        (by_layer, (3, 64, 64), {"reshard_after_forward": False}),
    ],
)
def test_the_update_reads_what_is_stored(run, shape, options) -> None:
    """The forward pass gathers the weight rounded, the update whole and exact."""

    def step(w, x):
        (loss, dw), order = run(w, lambda w: ((x @ w) ** 2).mean())
        return w - dw, {"loss": loss, "order": order + 0 * dw.mean()}

    sharded = shardfn.fully_shard(
        step, cpu_mesh(4), min_size=8, gather_dtype="bfloat16", **options
    )
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    x = rng.standard_normal((8, 64)).astype(np.float32)
    plan = sharded.plan(w, x)
    gathered = [(c.phase, c.dtype) for c in plan.collectives if c.op == "all_gather"]
    assert ("forward", "bfloat16") in gathered and ("update", "float32") in gathered
    order = sharded(w, x)[1]["order"]
    np.testing.assert_array_equal(order, np.sort(w, axis=-2))


def test_what_is_gathered_in_a_narrow_dtype_is_left_alone() -> None:
    plans = [
        shard_fn(
            descend(product), cpu_mesh(4), (16, 8), (8, 16), gather_dtype=dtype
        ).plan
        for dtype in (None, "float32", "bfloat16")
    ]
    assert plans[0].collectives == plans[1].collectives == plans[2].collectives


def test_maxima_of_narrow_floats_are_taken_in_float32() -> None:
    """Their bits are compared, and compilers widen integers of 16 bits."""
    case = shard_fn(
        lambda w, x: (w, {"max": low(x).max(), "min": low(x).min(0)}),
        cpu_mesh(4),
        (16, 8),
        (8, 16),
    )
    lines = case.plan.collectives
    assert [(c.op, c.dtype) for c in lines] == [("all_reduce", "float32")] * 2
    assert case.plan.verify(case.compile()).ok
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    x[5, 2] = np.nan
    made = case.step(np.ones((16, 8), np.float32), x)[1]
    assert made["max"].dtype == BFLOAT16 and np.isnan(made["max"])
    expected = np.array(low(jnp.asarray(x)).min(0), np.float32)
    np.testing.assert_array_equal(np.array(made["min"], np.float32), expected)


def test_one_device_rounds_nothing() -> None:
    case = shard_fn(
        descend(product),
        cpu_mesh(1),
        (16, 8),
        (8, 16),
        gather_dtype="bfloat16",
        reduce_dtype="float32",
    )
    dots = [e for e, *_ in walk(case.local) if e.primitive.name == "dot_general"]
    assert {str(e.outvars[0].aval.dtype) for e in dots} == {"bfloat16"}
    assert case.plan.collectives == ()
