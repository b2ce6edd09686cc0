"""What the order of gathers is worth in loops that compute for about as long as they
send: models with 2,048 tokens per device, with the order and with that of XLA.
The last ones are planned without it; they show what it would do. Compiled for GPUs that
are not there; needs the extra `aot`; a row takes 10 to 40 s.

    python benchmarks/balanced.py
    python benchmarks/balanced.py --case gpt-66b --case llama-70b
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import criteria_programs as programs
import jax
from criteria_cases import GPT_1B, GPT_175B, LLAMA_7B, Model
from criteria_table import markdown

from shardfn._core import compat
from shardfn._schedule import balanced_loops, order_gathers, undelayed_sums
from shardfn.analysis import Report, targets


def gpt(layers: int, width: int) -> Model:
    return replace(
        GPT_175B,
        layers=layers,
        width=width,
        heads=width // 128,
        mlp_width=4 * width,
    )


LLAMA_70B = Model(*("llama", 80, 8192, 64, 128, 28672, 32000, 2048), rows=1, kv_heads=8)
ORDERED = {
    "gpt-20b": (gpt(44, 6144), ("h100:8", "h100:64")),
    "gpt-30b": (gpt(48, 7168), ("h100:64",)),
    "gpt-66b": (gpt(64, 9216), ("h100:128",)),
    "gpt-175b": (GPT_175B, ("h100:64", "h100:128", "h100:512")),
}
LEFT_ALONE = {
    "gpt-1.3b": (replace(GPT_1B, rows=1), ("h100:64",)),
    "llama-7b": (replace(LLAMA_7B, context=2048), ("h100:64",)),
    "llama-70b": (LLAMA_70B, ("h100:128",)),
    "gpt-175b on h200": (GPT_175B, ("h200:128",)),
}
CASES = ORDERED | LEFT_ALONE
COLUMNS = (
    *("model", "target", "ordered by default", "step, XLA's order", "in turn"),
    *("of it", "memory, XLA's order", "in turn", "of it"),
)


@contextlib.contextmanager
def forced(ordered: bool) -> Iterator[None]:
    """Takes any loop for balanced that computes about as long as it sends, or none."""
    with contextlib.ExitStack() as stack:

        def patch(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        if ordered:
            for name in ("BALANCED_BYTES", "BALANCED_SHARE", "SUMS_PART"):
                patch(balanced_loops, name, 1)
            patch(compat, "misjudges_network", lambda device: True)
        else:
            for module in (order_gathers, undelayed_sums):
                patch(module, "is_balanced", lambda node, loop, axes: False)
        yield


def compiled(model: Model, target: str) -> Report:
    mesh = targets.mesh(target)
    step = programs.sharded(model, mesh)
    return step.on(target, *programs.arguments(model, mesh.size))


def row(name: str, target: str) -> list[str]:
    model = CASES[name][0]
    with forced(ordered=False):
        free = compiled(model, target)
    with forced(ordered=True):
        turn = compiled(model, target)
    seconds = free.step_seconds, turn.step_seconds
    memory = free.memory.temporary, turn.memory.temporary
    return [
        name.partition(" on ")[0],
        target,
        "yes" if name in ORDERED else "no",
        *(f"{1e3 * second:,.1f} ms" for second in seconds),
        f"{seconds[1] / seconds[0]:.3f}",
        *(f"{size / 2**30:.2f} GiB" for size in memory),
        f"{memory[1] / memory[0]:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES)
    rows = []
    for name in parser.parse_args().case or CASES:
        for target in CASES[name][1]:
            print(f"{name} on {target}", file=sys.stderr, flush=True)
            rows.append(row(name, target))
    print(f"JAX {jax.__version__}\n\n{markdown(COLUMNS, rows)}")


if __name__ == "__main__":
    main()
