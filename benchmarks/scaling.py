"""Predicted throughput of models whose scaling was published, from few devices to many,
on A100s and H100s that are not there (extra `aot`).

The models are those of the papers of FSDP (arXiv:2304.11277) and DDP
(arXiv:2006.15704): GPT-175B, T5-11B and a recommendation model like DHEN with their
state split, BERT-large and ResNet-50 as replicas. Rows are kept in
`results/scaling.json`.

    python benchmarks/scaling.py            # the table; measures what is missing
    python benchmarks/scaling.py --case bert-large --chip a100 --rerun
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import criteria_programs as programs
import jax
import scaling_models
from criteria_cases import GPT_175B, T5_11B, Model
from criteria_table import markdown

import shardfn
from shardfn.analysis import targets

RESULTS = Path(__file__).parent / "results" / "scaling.json"
CHIPS = ("a100", "h100")
BERT = Model("gpt", 24, 1024, 16, 64, 4096, 30522, 512, rows=32, remat=False)
"""BERT-large's sizes; that its attention is causal here changes no figure."""

Made = tuple[Callable[..., Any], Any, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model that grows with its devices.

    Attributes:
      devices: on how many.
      make: by the number of devices, the step with its state and batch as shapes.
      options: of `fully_shard`.
      rows: of the batch, per device.
    """

    devices: tuple[int, ...]
    make: Callable[[int], Made]
    options: dict[str, Any]
    rows: int


def transformer(model: Model, devices: int) -> Made:
    step = functools.partial(programs.train_step, model=model)
    functools.update_wrapper(step, programs.train_step)
    return step, *programs.arguments(model, devices)


def of_model(model: Model, devices: tuple[int, ...], **options: Any) -> Case:
    return Case(devices, functools.partial(transformer, model), options, model.rows)


def resnet(devices: int) -> Made:
    rows = RESNET_ROWS * devices
    return scaling_models.resnet_step, *scaling_models.resnet_arguments(rows)


def dhen(devices: int) -> Made:
    return scaling_models.dhen_step, *scaling_models.dhen_arguments(DHEN_ROWS * devices)


RESNET_ROWS, DHEN_ROWS = 64, 1024
CASES = {
    "gpt-175b": of_model(replace(GPT_175B, rows=2), (128, 512)),
    "gpt-175b, 1 row": of_model(GPT_175B, (128, 512)),
    "t5-11b": of_model(T5_11B, (8, 64, 512)),
    "dhen": Case((8, 64, 512), dhen, {}, DHEN_ROWS),
    "bert-large": of_model(BERT, (8, 64, 256), shard=False),
    "resnet-50": Case((8, 64, 256), resnet, {"shard": False}, RESNET_ROWS),
}
PUBLISHED = {
    ("gpt-175b", "a100"): "186 TFLOP/s (FSDP paper)",
    ("gpt-175b, 1 row", "a100"): "173 TFLOP/s (FSDP paper)",
}


def measure(name: str, chip: str, devices: int) -> dict[str, Any]:
    """The figures of one compiled step."""
    target, case = f"{chip}:{devices}", CASES[name]
    step, state, batch = case.make(devices)
    sharded = shardfn.fully_shard(step, targets.mesh(target), **case.options)

    def show(stage: str) -> None:
        print(f"{name} on {target}: {stage}", file=sys.stderr, flush=True)

    report = sharded.on(target, state, batch, progress=show)
    run, model = (sum(f.values()) for f in (report.flops.run, report.flops.model))
    return {
        "step": report.step_seconds,
        "exposed": report.exposed_seconds,
        "peak": report.memory.peak,
        "wire": report.verification.wire_bytes,
        "run": run,
        "model": model,
        "rows": case.rows,
        "as_planned": report.verification.ok,
        "jax": jax.__version__,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Throughput per device, and what is left of that on the fewest devices."""
    head = (
        *("model", "on", "step", "TFLOP/s", "without recomputation", "rows/s"),
        *("of the fewest", "exposed", "peak", "published"),
    )
    lines = []
    for name, case in CASES.items():
        for chip in CHIPS:
            keys = [f"{name} {chip}:{n}" for n in case.devices]
            found = [(key, rows[key]) for key in keys if key in rows]
            lines += [_line(name, key, r, found[0][1]) for key, r in found]
    return markdown(head, lines)


def _line(
    name: str, key: str, row: dict[str, Any], first: dict[str, Any]
) -> tuple[str, ...]:
    on = key.rpartition(" ")[2]
    took = row["step"]
    return (
        *(name, on, f"{1e3 * took:,.1f} ms", f"{row['run'] / took / 1e12:.0f}"),
        *(f"{row['model'] / took / 1e12:.0f}", f"{row['rows'] / took:.4g}"),
        *(f"{first['step'] / took:.1%}", f"{row['exposed'] / took:.1%}"),
        f"{row['peak'] / 2**30:.1f} GiB",
        PUBLISHED.get((name, on.partition(":")[0]), ""),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--chip", choices=CHIPS, action="append")
    parser.add_argument("--rerun", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.case or CASES:
        for chip in given.chip or CHIPS:
            for devices in CASES[name].devices:
                key = f"{name} {chip}:{devices}"
                if given.rerun or key not in rows:
                    rows[key] = measure(name, chip, devices)
                    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
