"""Held-out loss of the example's language model, trained with quantized gathers and
sums beside exact ones: for each seed the same text, batches and first weights.

A run writes its losses, and now and then its state; what is done is not done again, and
what was stopped goes on from its last state. The table shows what there is.

    python benchmarks/quantized_training.py    # 5M parameters: hours on two cores
    python benchmarks/quantized_training.py --preset 1m --steps 6 --seeds 1 --every 3
    python benchmarks/quantized_training.py --table            # runs nothing
    python benchmarks/quantized_training.py --plot losses.svg
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "lm_pretrain"))

import jax
import numpy as np
from config import PRESETS, DataConfig, ModelConfig, OptimizerConfig
from data import Share, heldout_batches, pack, training_batches
from documents import load_documents, split
from evaluate import evaluate
from models import count_parameters
from step import create_state, eval_step, train_step
from tokens import load_tokenizer

import shardfn

INT8, FP8 = "int8", "float8_e4m3fn"
ASKED: dict[str, dict[str, Any]] = {
    "exact": {},
    "gathers int8": {"gather_dtype": INT8},
    "gathers fp8": {"gather_dtype": FP8},
    "sums int8": {"reduce_dtype": INT8},
    "sums int8 by chance": {"reduce_dtype": INT8, "reduce_rounding": "stochastic"},
    "both int8": {"gather_dtype": INT8, "reduce_dtype": INT8},
    "both int8, every leaf": {"gather_dtype": INT8, "reduce_dtype": INT8},
}
"""Options of `fully_shard` by the name of their row. In the last one norms and other
small leaves are named one by one, and stored split, so that they are quantized, too."""

EVERY = "both int8, every leaf"

MODELS = PRESETS | {
    "5m": ModelConfig(
        layers=2,
        width=512,
        heads=8,
        kv_heads=4,
        mlp_width=1152,
        context=64,
        dtype="float32",
    )
}
"""By name; `5m`, which is not one of the example, has as few layers as make 5M
parameters and short windows, so that CPUs train it often enough for a table."""

WINDOW = 50
"""Steps over which losses are smoothed in the figure."""

OPTIMIZER = OptimizerConfig(learning_rate=1e-3)
"""For batches of few tokens."""


@dataclasses.dataclass(frozen=True)
class Study:
    """What all runs have in common."""

    preset: str
    steps: int
    rows: int
    every: int
    out: Path
    devices: int

    @functools.cached_property
    def texts(self) -> tuple[Any, Any]:
        """The training and the held-out text."""
        config = DataConfig()
        tokenizer = load_tokenizer(config)
        train, heldout = split(load_documents(config))
        return pack(train, tokenizer), pack(heldout, tokenizer)

    @property
    def model(self) -> Any:
        return MODELS[self.preset]

    def folder(self, asked: str, seed: int) -> Path:
        name = f"{asked} {self.preset} {self.steps} {seed}".replace(",", "")
        return self.out / name.replace(" ", "-")


def options_of(asked: str, state: Any) -> dict[str, Any]:
    """The options of one row."""
    if asked != EVERY:
        return ASKED[asked]
    flat, _ = jax.tree.flatten_with_path(state.params)
    named = {
        "params/" + jax.tree_util.keystr(path, simple=True, separator="/"): INT8
        for path, _ in flat
    }
    return {
        "gather_dtype": named,
        "reduce_dtype": named,
        "quantize_block": 32,
        "min_size": 0,
    }


def run(study: Study, asked: str, seed: int) -> None:
    """Trains one model to the end, from where it was left."""
    folder = study.folder(asked, seed)
    if (folder / "heldout.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    make = functools.partial(
        create_state, model=study.model, optimizer=OPTIMIZER, steps=study.steps
    )
    key = jax.random.key(seed)
    mesh = jax.make_mesh((study.devices,), ("data",))
    options = options_of(asked, jax.eval_shape(make, key))
    step = shardfn.fully_shard(train_step, mesh, stationary=False, **options)
    held = shardfn.fully_shard(eval_step, mesh, stationary=False)
    share = Share(study.rows)
    text, heldout = study.texts
    batches = training_batches(text, study.model.context, share, seed)
    state, losses = step.init(make, key), list[float]()
    if (folder / "state.npz").exists():
        state, losses = resumed(folder, step, state, batches)
    start, first = time.perf_counter(), len(losses)
    while len(losses) < study.steps:
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
        if not np.isfinite(losses[-1]):
            raise ArithmeticError(f"{asked}, seed {seed}: step {len(losses)} diverged")
        if len(losses) % study.every == 0 or len(losses) == study.steps:
            keep(folder, step, state, losses, batches)
            each = (time.perf_counter() - start) / (len(losses) - first)
            print(
                f"{asked}, seed {seed}: step {len(losses)} of {study.steps}, loss "
                f"{losses[-1]:.4f}, {each:.2f} s a step",
                flush=True,
            )
    loss = evaluate(
        held, state, heldout_batches(heldout, study.model.context, share), heldout.bytes
    )
    write(folder / "heldout.json", json.dumps({"per_byte": loss.per_byte}))
    (folder / "state.npz").unlink()


def keep(
    folder: Path, step: Any, state: Any, losses: list[float], batches: Any
) -> None:
    """Writes the state, the losses so far, and the place in the text."""
    leaves = jax.tree.leaves(jax.device_get(step.unshard(state)))
    scratch = folder / "state.new.npz"
    with open(scratch, "wb") as file:
        np.savez(file, *leaves, losses=losses, place=json.dumps(place_of(batches)))
    os.replace(scratch, folder / "state.npz")
    write(folder / "losses.json", json.dumps([round(loss, 4) for loss in losses]))


def place_of(batches: Any) -> Any:
    place = batches.get_state()
    return place.decode() if isinstance(place, bytes) else place


def resumed(folder: Path, step: Any, state: Any, batches: Any) -> tuple[Any, list]:
    """The state and losses that `keep` wrote; the text goes on from there."""
    with np.load(folder / "state.npz") as kept:
        treedef = jax.tree.structure(state)
        leaves = [kept[f"arr_{i}"] for i in range(treedef.num_leaves)]
        losses = kept["losses"].tolist()
        place = json.loads(str(kept["place"]))
    batches.set_state(place)
    return step.shard(jax.tree.unflatten(treedef, leaves)), losses


def write(path: Path, text: str) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def table(study: Study, names: Iterable[str], seeds: int) -> list[str]:
    """Held-out loss of each row, and how far it is from the exact run of its seed: the
    mean and the standard deviation over seeds, as a table of Markdown."""
    lines = [
        "| asked | seeds | held-out loss | from the exact run's | spread |",
        "|---|---|---|---|---|",
    ]
    for asked in names:
        done = finished(study, asked, seeds)
        if not done:
            continue
        losses = np.array([heldout_of(study, asked, seed) for seed in done])
        exact = np.array([heldout_of(study, "exact", seed) for seed in done])
        apart, spread = f"{np.mean(losses - exact):+.4f}", np.std(losses - exact)
        if asked == "exact":
            apart, spread = "", np.std(losses)
        cells = asked, len(done), f"{losses.mean():.4f}", apart, f"{spread:.4f}"
        lines.append(f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |"))
    return lines


def heldout_of(study: Study, asked: str, seed: int) -> float | None:
    path = study.folder(asked, seed) / "heldout.json"
    return json.loads(path.read_text())["per_byte"] if path.exists() else None


def finished(study: Study, asked: str, seeds: int) -> list[int]:
    """The seeds of which a run of this row, and the exact one, are done."""
    names = {asked, "exact"}
    return [
        seed
        for seed in range(seeds)
        if all(heldout_of(study, name, seed) is not None for name in names)
    ]


def plot(study: Study, names: Iterable[str], seeds: int, to: str) -> None:
    """Draws, of the runs that are done, the training loss, smoothed over 50 steps, how
    far it is from that of the exact run of the same seed, and the same of the held-out
    loss: a dot for each seed, a bar for the mean and its spread."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardfn"
    from matplotlib import pyplot

    done = {name: finished(study, name, seeds) for name in names}
    done = {name: found for name, found in done.items() if found}
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
    for number, (asked, found) in enumerate(done.items()):
        color = "black" if asked == "exact" else f"C{number - 1}"
        style = {"color": color, "lw": 1.2, "label": asked}
        each = {seed: smoothed(study, asked, seed) for seed in found}
        exact = {seed: smoothed(study, "exact", seed) for seed in found}
        at = 10 * np.arange(len(each[found[0]])) + WINDOW
        left.plot(at, np.mean([*each.values()], axis=0), **style)
        if asked == "exact":
            continue
        away = np.array([each[seed] - exact[seed] for seed in found])
        middle.plot(at, away.mean(axis=0), **style)
        middle.fill_between(at, away.min(0), away.max(0), color=color, alpha=0.12, lw=0)
        loss = [heldout_of(study, asked, s) for s in found]
        from_exact = np.subtract(loss, [heldout_of(study, "exact", s) for s in found])
        right.plot(from_exact, [number] * len(found), "o", color=color, ms=4)
        right.errorbar(
            *(from_exact.mean(), number),
            xerr=from_exact.std() if len(found) > 1 else None,
            **{"fmt": "|", "color": color, "ms": 16, "capsize": 4},
        )
    whole = [heldout_of(study, "exact", seed) for seed in done.get("exact", ())]
    if len(whole) > 1:
        far = np.std(whole)
        right.axvspan(-far, far, color="black", alpha=0.07, lw=0)
    for axes in (middle, right):
        (axes.axhline if axes is middle else axes.axvline)(0, color="black", lw=0.8)
    left.set(xlabel="step", ylabel="training loss, nats per token")
    left.set_ylim(top=float(np.quantile(left.lines[0].get_ydata(), 0.95)) + 0.1)
    left.legend(fontsize=8)
    middle.set(xlabel="step", ylabel="training loss, from the exact run's")
    right.set(xlabel="held-out loss, nats per byte, from the exact run's")
    right.set_yticks(range(1, len(done)), list(done)[1:])
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None} if to.endswith(".svg") else None)


def smoothed(study: Study, asked: str, seed: int) -> Any:
    """The mean training loss of `WINDOW` steps, at every tenth."""
    path = study.folder(asked, seed) / "losses.json"
    losses = json.loads(path.read_text())
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")[::10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=MODELS, default="5m")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--every", type=int, default=50, help="steps between states")
    parser.add_argument("--asked", choices=ASKED, action="append")
    parser.add_argument("--out", type=Path, default=Path("runs/quantized"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--plot", help="also draw the losses to this file")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", given.devices)
    study = Study(
        *(given.preset, given.steps, given.rows, given.every, given.out, given.devices)
    )
    names = given.asked or list(ASKED)
    if not given.table:
        print(f"{count_parameters(study.model) / 1e6:.1f}M parameters", flush=True)
        for seed in range(given.seeds):
            for asked in names:
                run(study, asked, seed)
    print(*table(study, names, given.seeds), sep="\n")
    if given.plot:
        plot(study, names, given.seeds, given.plot)


if __name__ == "__main__":
    main()
