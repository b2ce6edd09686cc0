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

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import beside
import jax
import jax.numpy as jnp
import optax
from criteria_cases import CHIPS, Case, Model
from criteria_models import attend, init, narrow, norm
from criteria_programs import ADAMW, update
from jax.sharding import Mesh, NamedSharding

import shardfn
from shardfn.analysis import targets

MIXTRAL = Model("llama", 32, 4096, 32, 128, 14336, 32000, 4096, rows=1, kv_heads=8)
_CASES = (
    Case("mixtral-64", MIXTRAL, 64),
    Case("mixtral-8", replace(MIXTRAL, layers=4), 8),
)
CASES = {case.name: case for case in _CASES}
EXPERTS, CHOSEN = 8, 2
PROGRAMS = ("shardfn", "jit", "constrained")
RESULTS = Path(__file__).parent / "results" / "ragged_experts.json"
HEADER = ("case", "chip", "program", "sent", "of M", "peak temporary", "predicted")

Constrain = Callable[[jax.Array], jax.Array]


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


def make_step(model: Model, rows: Constrain = lambda x: x) -> Callable[..., Any]:
    def train_step(state: Any, batch: Any) -> Any:
        loss_of = functools.partial(mean_loss, model=model, rows=rows)
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        return update(state, grads), loss

    return train_step


def constrain(mesh: Mesh) -> Constrain:
    rows = NamedSharding(mesh, beside.ROWS)
    return lambda x: jax.lax.with_sharding_constraint(x, rows)


def measured(name: str, chip: str, program: str, shown: bool = False) -> dict[str, Any]:
    """Compiles one program; a row of JSON, with `error` if the compiler refuses."""
    case = CASES[name]
    model, target = case.model, case.target(chip)
    mesh = targets.mesh(target)
    tokens = jax.ShapeDtypeStruct((model.rows * case.devices, model.context), jnp.int32)
    state = jax.eval_shape(functools.partial(create, model))
    args = state, {"inputs": tokens, "targets": tokens}
    step = shardfn.fully_shard(make_step(model), mesh)
    row: dict[str, Any] = {"jax": jax.__version__}
    if program == "shardfn":
        if shown:
            print(step.plan(*args), end="\n\n")
        lowered = step.lower(*args)
    else:
        rows = constrain(mesh) if program == "constrained" else (lambda x: x)
        lowered = beside.jitted(make_step(model, rows), step, args)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        return row | {"error": str(error).splitlines()[0]}
    if program == "shardfn":
        checked = step.plan(*args).verify(compiled.as_text() or "")
        row |= {"as_planned": checked.ok, "problems": checked.problems()}
    elements = sum(x.size for x in jax.tree.leaves(state["params"]))
    return row | asdict(beside.figures(compiled, mesh, target)) | {"M": 2 * elements}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--program", choices=PROGRAMS, action="append")
    parser.add_argument("--rerun", action="store_true", help="measure kept rows again")
    parser.add_argument(
        "--plan", action="store_true", help="print a measured plan, too"
    )
    args = parser.parse_args()
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for cells in (HEADER, ["---"] * len(HEADER)):
        print(f"| {' | '.join(cells)} |")
    chosen = args.case or CASES, args.chip or CHIPS, args.program or PROGRAMS
    for names in itertools.product(*chosen):
        key = " ".join(names)
        if args.rerun or key not in kept:
            kept[key] = measured(*names, args.plan)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"| {' | '.join([*names, *cells_of(kept[key])])} |", flush=True)


def cells_of(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        full = "Ran out of memory" in row["error"]
        return ["does not fit" if full else row["error"], "", "", ""]
    planned = "" if row.get("as_planned", True) else ", not as planned"
    return [
        f"{row['wire'] / 2**30:,.1f} GiB{planned}",
        f"{row['wire'] / row['M']:.2f} M",
        f"{row['temporary'] / 2**30:,.1f} GiB",
        f"{row['seconds']:,.2f} s",
    ]


if __name__ == "__main__":
    main()
