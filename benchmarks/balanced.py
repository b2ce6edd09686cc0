"""What the order of gathers is worth in loops that send for as long as they compute, or
for not much less: in the order of XLA, in turn, and in turn with the first weights
gathered a layer ahead, which is the default between the hosts of Hopper GPUs. The rows
that are planned otherwise show what it would do. Compiled for GPUs that are not there;
needs the extra `aot`; a row takes 20 to 90 s.

    python benchmarks/balanced.py
    python benchmarks/balanced.py --case gpt-66b --case llama-70b
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from criteria_cases import GPT_1B, GPT_175B, LLAMA_7B, Model
from criteria_table import markdown

from shardfn._core import compat
from shardfn._schedule import balanced_loops, order_gathers, undelayed_sums
from shardfn.analysis import Plan, Report, targets
from shardfn.storage import _stored_layout


def gpt(layers: int, width: int) -> Model:
    return replace(
        GPT_175B,
        layers=layers,
        width=width,
        heads=width // 128,
        mlp_width=4 * width,
    )


LLAMA_70B = Model(*("llama", 80, 8192, 64, 128, 28672, 32000, 2048), rows=1, kv_heads=8)
CASES = {
    "gpt-20b": (gpt(44, 6144), ("h100:8", "h100:64", "h200:64")),
    "gpt-13b": (gpt(40, 5120), ("h100:64",)),
    "gpt-30b": (gpt(48, 7168), ("h100:64",)),
    "gpt-66b": (gpt(64, 9216), ("h100:128",)),
    "gpt-175b": (GPT_175B, ("h100:64", "h100:128", "h100:512", "h200:128")),
    "llama-70b": (LLAMA_70B, ("h100:128",)),
    "llama-7b": (replace(LLAMA_7B, context=2048), ("h100:64",)),
    "gpt-1.3b": (replace(GPT_1B, rows=1), ("h100:64",)),
    "gpt-175b, 2 rows": (
        replace(GPT_175B, rows=2),
        ("h100:512", "h200:512", "b200:512"),
    ),
    "gpt-66b, 2 rows": (replace(gpt(64, 9216), rows=2), ("h100:128",)),
    "llama-70b, 2 rows": (replace(LLAMA_70B, rows=2), ("h100:128",)),
}
FREE, IN_TURN, AHEAD = "XLA's order", "in turn", "ahead"
COLUMNS = (
    *("model", "target", "planned", f"step, {FREE}", IN_TURN, AHEAD, "of it"),
    *(f"memory, {FREE}", IN_TURN, AHEAD),
)


@contextlib.contextmanager
def forced(order: str) -> Iterator[None]:
    """Takes any loop for one whose gathers begin in this order, or none."""
    with contextlib.ExitStack() as stack:

        def patch(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        if order == FREE:
            patch(order_gathers, "_why_in_turn", lambda *a, **k: None)
            patch(undelayed_sums, "is_balanced", lambda *a: False)
        else:
            for name in ("BALANCED_BYTES", "BALANCED_SHARE", "SUMS_PART"):
                patch(balanced_loops, name, 1)
            patch(compat, "misjudges_network", lambda device: True)
            patch(compat, "hides_network", lambda device: True)
            patch(_stored_layout, "slices_of", lambda devices: 2)
        yield


def compiled(model: Model, target: str, **options: Any) -> Report:
    mesh = targets.mesh(target)
    step = programs.sharded(model, mesh, **options)
    return step.on(target, *programs.arguments(model, mesh.size))


def plan_of(model: Model, target: str) -> Plan:
    """The plan of a step without options."""
    mesh = targets.mesh(target)
    return programs.sharded(model, mesh).plan(*programs.arguments(model, mesh.size))


def planned(model: Model, target: str) -> str:
    """Which of the orders a step has by itself."""
    plan = plan_of(model, target)
    if not order_gathers.orders_gathers(plan.body):
        return FREE
    return AHEAD if any(c.ahead for c in plan.collectives) else IN_TURN


def row(name: str, target: str) -> list[str]:
    model, reports = CASES[name][0], dict[str, Report]()
    for order in (FREE, IN_TURN, AHEAD):
        with forced(order):
            options = {} if order == AHEAD else {"prefetch": 0}
            reports[order] = compiled(model, target, **options)
    steps = {order: each.step_seconds for order, each in reports.items()}
    as_planned = planned(model, target)
    return [
        *(name, target, as_planned),
        *(f"{1e3 * seconds:,.1f} ms" for seconds in steps.values()),
        f"{steps[AHEAD] / steps[FREE]:.3f}",
        *(f"{each.memory.temporary / 2**30:.2f} GiB" for each in reports.values()),
    ]


def print_table(
    description: str | None,
    cases: Mapping[str, tuple[Model, tuple[str, ...]]],
    columns: tuple[str, ...],
    row: Callable[[str, str], list[str]],
) -> None:
    """Prints the rows of the cases that the command line names, or of all, each on its
    targets, and each also when it is there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--case", action="append", choices=cases)
    rows = []
    for name in parser.parse_args().case or cases:
        for target in cases[name][1]:
            print(f"{name} on {target}", file=sys.stderr, flush=True)
            rows.append(row(name, target))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"JAX {jax.__version__}\n\n{markdown(columns, rows)}")


if __name__ == "__main__":
    print_table(__doc__, CASES, COLUMNS, row)
