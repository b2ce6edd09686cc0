"""A mixture of experts without capacity, as it is written for one device: the rows of
the whole batch are sorted by expert and multiplied in ragged groups (`ragged_dot`).
What a device sends, holds and takes with shardfn and under `jit`, compiled for machines
that are not there.

    python benchmarks/ragged_experts.py
    python benchmarks/ragged_experts.py --case mixtral-64 --chip h100 --plan

Cases are Mixtral 8x7B (32 layers of 4096, 8 experts of 14336, 2 for each token) on 64
devices, and 4 of its layers on 8. `jit` is given the state as shardfn stores it;
`constrained` also has the batch dimension of activations constrained by hand, and that
of the sorted rows.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import beside_table
import jax
import jax.numpy as jnp
import optax
from beside_table import Constrain
from criteria_cases import Case, Model
from criteria_models import attend, init, narrow, norm
from criteria_programs import ADAMW, update

from shardfn.analysis import targets

MIXTRAL = Model("llama", 32, 4096, 32, 128, 14336, 32000, 4096, rows=1, kv_heads=8)
_CASES = (
    Case("mixtral-64", MIXTRAL, 64),
    Case("mixtral-8", replace(MIXTRAL, layers=4), 8),
)
CASES = {case.name: case for case in _CASES}
EXPERTS, CHOSEN = 8, 2
RESULTS = Path(__file__).parent / "results" / "ragged_experts.json"


def create(model: Model) -> Any:
    """State from nothing: only its shapes are ever asked for."""
    params = init(model)
    L, D, F = model.layers, model.width, model.mlp_width
    params["layers"]["mlp"] = {
        "norm": jnp.ones((L, D)),
        "router": jnp.zeros((L, D, EXPERTS)),
        "gate": jnp.zeros((L, EXPERTS, D, F)),
        "in": jnp.zeros((L, EXPERTS, D, F)),
        "out": jnp.zeros((L, EXPERTS, F, D)),
    }
    return {"params": params, "opt": ADAMW.init(params)}


def experts(w: Any, x: jax.Array, rows: Constrain) -> jax.Array:
    """Each token `[B, T, D]` through the experts that its router weighs most."""
    tokens = x.reshape(-1, x.shape[-1])
    scores = (tokens @ w["router"]).astype(jnp.float32)
    weight, expert = jax.lax.top_k(scores, CHOSEN)
    order = jnp.argsort(expert.reshape(-1))
    sizes = jnp.bincount(expert.reshape(-1), length=EXPERTS)
    taken = rows(tokens[order // CHOSEN])
    hidden = jax.nn.silu(jax.lax.ragged_dot(taken, w["gate"], sizes))
    hidden = rows(hidden * jax.lax.ragged_dot(taken, w["in"], sizes))
    made = rows(jax.lax.ragged_dot(hidden, w["out"], sizes))
    back = made[jnp.argsort(order)].reshape(*weight.shape, -1)
    mixed = jnp.einsum("tkd,tk->td", back, jax.nn.softmax(weight).astype(x.dtype))
    return mixed.reshape(x.shape)


def mean_loss(params: Any, batch: Any, model: Model, rows: Constrain) -> jax.Array:
    """Mean cross-entropy in nats."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = narrow(w)
        y = norm(x, w["attention"]["norm"])
        x = x + attend(w["attention"], y, y, model, None, True)
        return rows(x + experts(w["mlp"], norm(x, w["mlp"]["norm"]), rows)), None

    once = narrow({k: v for k, v in params.items() if k != "layers"})
    x = rows(once["embedding"][batch["inputs"]])
    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = rows((norm(x, once["norm"]) @ once["head"]).astype(jnp.float32))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.mean(losses)


def make_step(model: Model, rows: Constrain) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> Any:
        loss_of = functools.partial(mean_loss, model=model, rows=rows)
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        return update(state, grads), loss

    return train_step


def measured(name: str, chip: str, program: str, shown: bool = False) -> dict[str, Any]:
    """A row of JSON."""
    case = CASES[name]
    model, target = case.model, case.target(chip)
    tokens = jax.ShapeDtypeStruct((model.rows * case.devices, model.context), jnp.int32)
    state = jax.eval_shape(functools.partial(create, model))
    args = state, {"inputs": tokens, "targets": tokens}
    make = functools.partial(make_step, model)
    return beside_table.measured(
        program, make, args, targets.mesh(target), target, shown
    )


if __name__ == "__main__":
    beside_table.print_table(__doc__, CASES, RESULTS, measured)
