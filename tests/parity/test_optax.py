"""In: everything in optax and optax.contrib that makes a gradient transformation, found
by listing the packages. Out: over 8 devices it updates a small state as over one, and
its moments take their parameters' automatic axes.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from sharded_and_plain import make_mesh
from tiers import tiered

import shardfn
from shardfn.storage._related_leaves import with_moments
from shardfn.storage._stored_array import stored_array
from shardfn.testing import assert_same

pytestmark = [
    pytest.mark.standard_promotion,
    # What optax is about to drop is run as long as it is there.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

STEPS = 2
RATE = 1e-2
TOL = 1e-5
# The state of a line search holds differences of losses; GaLore's is projected onto
# singular vectors of the gradient, which half a unit of rounding in the batch moves by
# 6e-6 on one device too.
SENSITIVE_TOL = 1e-4
SENSITIVE = ("linesearch", "lbfgs", "galore")
# A matrix, a vector that 8 does not divide, a scalar.
SHAPES = {"w": (8, 12), "b": (13,), "s": ()}

Make = Callable[..., Any]


def _norm(updates, *_):
    return optax.tree.norm(updates)


# What a parameter of this name is given, if it has no default.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "adv_optimizer": lambda: optax.chain(optax.contrib.normalize(), optax.sgd(0.05)),
    "base_optimizer": lambda: optax.adam(RATE),
    "clipping": lambda: 0.01,
    "decay": lambda: 0.9,
    "eta": lambda: 0.1,
    "fast_optimizer": lambda: optax.adam(RATE),
    "freeze_mask": lambda: {"w": True, "b": False, "s": True},
    "gamma": lambda: 0.5,
    "inner": lambda: optax.adam(RATE),
    "l2_norm_clip": lambda: 0.1,
    "learning_rate": lambda: RATE,
    "mask": lambda: {"w": True, "b": False, "s": True},
    "max_backtracking_steps": lambda: 4,
    "max_consecutive_errors": lambda: 3,
    "max_delta": lambda: 0.1,
    "max_linesearch_steps": lambda: 4,
    "max_norm": lambda: 0.1,
    "measure": lambda: _norm,
    "measure_name": lambda: "norm",
    "noise_multiplier": lambda: 0.1,
    "optimizer": lambda: optax.adam(RATE),
    "param_labels": lambda: {"w": "a", "b": "b", "s": "a"},
    "seed": lambda: 0,
    "should_transform_fn": lambda: lambda step: step % 2 == 0,
    "slow_step_size": lambda: 0.5,
    "step_size": lambda: 0.1,
    "step_size_fn": lambda: lambda count: 0.1 / (count + 1.0),
    "sync_period": lambda: 2,
    "threshold": lambda: 0.01,
    "transforms": lambda: {"a": optax.adam(RATE), "b": optax.sgd(RATE)},
    "tx": lambda: optax.adam(RATE),
}

# The same for parameters with a default that optax warns about.
REPLACED: dict[str, Callable[[], Any]] = {"key": lambda: 0}

# Those whose arguments do not follow from the names of their parameters.
MADE: dict[str, Callable[[Make], optax.GradientTransformation]] = {
    # Without a rate it moves a scalar by its own size: what is left is rounding.
    "adafactor": lambda make: make(RATE),
    "chain": lambda make: make(optax.clip(0.1), optax.adam(RATE)),
    "inject_hyperparams": lambda make: make(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 5)
    ),
    "inject_stateful_hyperparams": lambda make: make(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 5)
    ),
    "lbfgs": lambda make: make(
        memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(3)
    ),
    "measure_with_ema": lambda make: optax.monitor({"norm": make(_norm, 0.9)}),
    "monitor": lambda make: make({"norm": optax.measure_with_ema(_norm, 0.9)}),
    "named_chain": lambda make: make(
        ("first", optax.clip(0.1)), ("second", optax.adam(RATE))
    ),
    "scale_by_muon": lambda make: make(
        weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()}
    ),
    "stateless": lambda make: make(lambda updates, _: optax.tree.scale(0.1, updates)),
    "stateless_with_tree_map": lambda make: make(lambda update, _: 0.1 * update),
    "MultiSteps": lambda make: make(optax.adam(RATE), 2).gradient_transformation(),
}

# Leaves of the state, for those that do not take all three on one device either.
LEAVES: dict[str, tuple[tuple[str, ...], str]] = {
    "scale_by_distance_over_gradients": (("w", "b"), "makes a scalar an array of one"),
    "scale_by_muon": (("w",), "takes matrices only"),
    "scale_by_sm3": (("w", "b"), "has no accumulator for a scalar"),
    "sm3": (("w", "b"), "has no accumulator for a scalar"),
}

# Extra arguments of `update`. Others take none, or can do without.
EXTRA: dict[str, tuple[str, ...]] = {
    "hutchinson_estimator_diag_hessian": ("obj_fn",),
    "lbfgs": ("value", "grad", "value_fn"),
    "momo": ("value",),
    "momo_adam": ("value",),
    "polyak_sgd": ("value",),
    "reduce_on_plateau": ("value",),
    "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_polyak": ("value",),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"),
    "sophia": ("obj_fn",),
}

# These add leaves to their state in the first update, which is made on one device.
GROWING = ("measure_with_ema", "monitor")

# These take the gradient of every example.
PER_EXAMPLE = ("differentially_private_aggregate", "dpsgd")

# Functions whose results optax does not annotate, and that are no transformations.
OTHERS = {
    "bias_correction",
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}

# Whatever primitives, collectives, kinds of leaves and extra arguments the others have,
# one of these has too.
QUICK = """
MultiSteps adafactor adam apply_if_finite dpsgd flatten inject_hyperparams lookahead
madgrad masked mechanize monitor partition reduce_on_plateau scale_by_galore
scale_by_lbfgs scale_by_muon scale_by_sign scale_by_zoom_linesearch sm3 sophia zero_nans
""".split()

# Nothing of optax 0.2.8: each entry is a name and the reason why it cannot be run.
SKIPPED: dict[str, str] = {}


def functions() -> dict[str, Make]:
    """The public functions of optax and optax.contrib, and `MultiSteps`, by name."""
    found: dict[str, Make] = {"MultiSteps": optax.MultiSteps}
    for module in (optax, optax.contrib):
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value):
                continue
            if isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
                found[name] = value
    return found


def is_transformation(make: Make) -> bool | None:
    """Whether `make` returns a transformation; None if it does not say."""
    if inspect.isclass(make):
        return True
    returned = inspect.signature(make).return_annotation
    if returned is inspect.Signature.empty:
        return None
    return "GradientTransformation" in str(returned)


def transformations() -> dict[str, Make]:
    return {
        name: make
        for name, make in functions().items()
        if is_transformation(make) is not False and name not in OTHERS | {*SKIPPED}
    }


def make_transformation(name: str) -> optax.GradientTransformation:
    make = functions()[name]
    if name in MADE:
        return MADE[name](make)
    arguments = {}
    for parameter in inspect.signature(make).parameters.values():
        if parameter.name in REPLACED:
            arguments[parameter.name] = REPLACED[parameter.name]()
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            arguments[parameter.name] = ARGUMENTS[parameter.name]()
    return make(**arguments)


def make_params(name: str) -> Any:
    leaves, _ = LEAVES.get(name, (tuple(SHAPES), ""))
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=SHAPES[k]), jnp.float32) for k in leaves}
    if name == "lookahead":
        return optax.LookaheadParams.init_synced(params)
    return params


def loss_fn(params: Any, batch: Any) -> jax.Array:
    params = getattr(params, "fast", params)
    # Gradients of full rank: the directions of others are decided by rounding.
    out = jnp.tanh(batch["x"] @ params["w"]).mean(-1)
    if "b" in params:
        out += jnp.tanh(batch["z"] @ params["b"])
    return ((out * params.get("s", 1.0) - batch["y"]) ** 2).mean()


def make_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"x": (16, 8), "z": (16, 13), "y": (16,)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def make_step(name: str, tx: optax.GradientTransformation) -> Callable[..., Any]:
    def gradients(params, batch):
        if name in PER_EXAMPLE:
            rows = jax.tree.map(lambda x: x[:, None], batch)
            return jax.vmap(jax.grad(loss_fn), (None, 0))(params, rows)
        return jax.grad(loss_fn)(params, batch)

    def train_step(state, batch):
        params, opt = state
        loss, grads = loss_fn(params, batch), gradients(params, batch)
        if name == "lookahead":
            grads = grads.fast
        extra = {
            "value": loss,
            "grad": grads,
            "value_fn": lambda params: loss_fn(params, batch),
            "obj_fn": lambda params: loss_fn(params, batch),
        }
        extra = {key: extra[key] for key in EXTRA.get(name, ())}
        updates, opt = tx.update(grads, opt, params, **extra)
        return (optax.apply_updates(params, updates), opt), loss

    return train_step


def test_no_function_is_missed() -> None:
    """Every one is run, is skipped for a reason, or says that it returns no
    transformation."""
    found = functions()
    unclear = {name for name, make in found.items() if is_transformation(make) is None}
    unclear -= {*transformations(), *SKIPPED, *OTHERS}
    assert not unclear
    tables = {*MADE, *LEAVES, *EXTRA, *GROWING, *PER_EXAMPLE, *OTHERS, *SKIPPED}
    assert tables <= {*found}, "these are not in optax any more"
    assert not [n for n in OTHERS | {*SKIPPED} if n in transformations()]
    assert all(SKIPPED.values())
    # As many as there were when this test was written; more when optax grows.
    assert len(transformations()) >= 125


@pytest.mark.parametrize("name", tiered(sorted(transformations()), QUICK))
def test_updates_as_on_one_device(name: str) -> None:
    tx, params = make_transformation(name), make_params(name)
    assert isinstance(tx, optax.GradientTransformation)
    plain_state = jax.tree.map(jnp.asarray, (params, tx.init(params)))
    train_step = make_step(name, tx)
    plain = jax.jit(train_step)
    if name in GROWING:
        plain_state, _ = plain(plain_state, make_batch(STEPS))
    step = shardfn.fully_shard(train_step, make_mesh("8"), min_size=8, strict=True)
    state = step.shard(plain_state)
    assert not stored_array(jax.tree.leaves(state)[0]).sharding.is_fully_replicated
    tol = SENSITIVE_TOL if any(part in name for part in SENSITIVE) else TOL
    for k in range(STEPS):
        plain_state, plain_loss = plain(plain_state, make_batch(k))
        state, loss = step(state, make_batch(k))
        assert_same(plain_loss, loss, f"step {k + 1}, loss", tol=tol)
        whole = step.unshard(state)
        assert_same(
            plain_state, whole, f"step {k + 1}, state", tol=tol, weak_types=False
        )


# Of one shape one leaf is split and another is not, or along another dimension.
SPLIT = {
    "w": {"k": ((8, 12), (("model",), ())), "q": ((8, 12), ((), ("model",)))},
    "b": {"k": ((13,), (("model",),)), "q": ((13,), ())},
    "s": {"k": ((), ())},
}
# Their states have no leaf of a parameter, or several leaves in place of one.
NOT_BY_PARAMETER = """
flatten lbfgs lookahead scale_by_backtracking_linesearch scale_by_sm3
scale_by_zoom_linesearch sm3
""".split()


def test_moments_are_split_as_the_parameters_that_optax_names() -> None:
    """Optax knows them by the transformation, which a step does not show."""
    found = {"as a parameter": 0, "whole": 0}
    for name in sorted({*transformations()} - {*NOT_BY_PARAMETER}):
        leaves, _ = LEAVES.get(name, (tuple(SPLIT), ""))
        each = [SPLIT[k][n] for k in sorted(leaves) for n in sorted(SPLIT[k])]
        params = {
            k: {n: jnp.ones(shape) for n, (shape, _) in SPLIT[k].items()}
            for k in leaves
        }
        tx = make_transformation(name)
        state = {"opt": jax.eval_shape(tx.init, params), "params": params}
        flat, _ = jax.tree_util.tree_flatten_with_path(state)
        paths, shapes = [p for p, _ in flat], [x.shape for _, x in flat]
        own, moments = [auto for _, auto in each], len(flat) - len(each)
        # Leaves of the optimizer say that they are whole, or say nothing.
        whole, unsaid = (
            with_moments(paths, shapes, [says] * moments + own) for says in ((), None)
        )
        for i, index in enumerate(_parameters(tx, state)):
            shape, auto = ((), ()) if index is None else each[index]
            if shapes[i] == shape or index is None:
                at = f"{name}{jax.tree_util.keystr(paths[i])}"
                assert whole[i] == unsaid[i] == auto, at
                found["whole" if index is None else "as a parameter"] += 1
    assert min(found.values()) >= 100


def _parameters(tx: optax.GradientTransformation, state: Any) -> list[int | None]:
    """For each leaf of an optimizer's state, which parameter's it is, by number."""
    numbers = iter(range(len(jax.tree.leaves(state["params"]))))
    numbered = jax.tree.map(lambda _: [next(numbers)], state["params"])
    marked = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, number: [] if isinstance(leaf, optax.MaskedNode) else number,
        state["opt"],
        numbered,
        transform_non_params=lambda _: [None],
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    lists = jax.tree.leaves(marked, is_leaf=lambda x: isinstance(x, list))
    return [number for each in lists for number in each]
