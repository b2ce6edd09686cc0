"""Predicted steps beside published ones: the same models on the same machines, compiled
for devices that are not there and played (extra `aot`).

The published programs use fused attention, which writes no scores to memory. So do the
models here on GPUs; the one for TPUs is plain, and what its scores take is a column of
its own. What was measured once is printed from `results/anchors.json`.

    python benchmarks/anchors.py                  # the table
    python benchmarks/anchors.py --case maxtext-llama2-7b --rerun    # minutes each
"""

import argparse
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import criteria_programs as programs
import jax
from criteria_cases import Model
from criteria_models import SCORES, Hand
from criteria_table import markdown

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo.timeline import MATMUL, WAIT
from shardfn.analysis.report import Report

RESULTS = Path(__file__).parent / "results" / "anchors.json"

LLAMA_2_7B = Model(
    *("llama", 32, 4096, 32, 128, 11008, 32000, 4096, 2), remat=False, fused=True
)
LLAMA_3_8B = Model(
    *("llama", 32, 4096, 32, 128, 14336, 128256, 8192, 2),
    remat=False,
    kv_heads=8,
    fused=True,
)
LLAMA_2_70B = Model(
    *("llama", 80, 8192, 64, 128, 28672, 32000, 4096, 2), remat=False, kv_heads=8
)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published step.

    Attributes:
      target: its machines.
      model: its sizes and rows per device.
      saves_mlp: whether the inner products of MLPs are saved for the backward pass,
        as all other products of activations and weights are.
      source: who published it, where, of which date.
      seconds: published.
      mfu: published in place of seconds, which follow from the model's FLOPs.
    """

    target: str
    model: Model
    saves_mlp: bool
    source: str
    seconds: float = 0.0
    mfu: float = 0.0


ANCHORS = {
    "maxtext-llama2-7b": Anchor(
        "h100:8",
        LLAMA_2_7B,
        True,
        "NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md, July 2026: MaxText, "
        "DGX H100, 16 rows, FSDP 8, cuDNN attention, `minimal_flash`, not scanned",
        seconds=0.721,
    ),
    "torchtitan-llama3-8b": Anchor(
        "h100:8",
        LLAMA_3_8B,
        False,
        "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 6,667 tokens "
        "per second and GPU, `torch.compile`, half of the products computed twice; "
        "its H100s have 2.4 TB/s and 500 W",
        seconds=2 * 8192 / 6667,
    ),
    "maxtext-llama2-70b": Anchor(
        "tpu:v5p:4x4x4",
        LLAMA_2_70B,
        False,
        "AI-Hypercomputer/maxtext, tests/end_to_end/tpu/llama2/run_llama2.md: 65% MFU "
        "on v5p-128, and benchmarks/maxtext_v5p_model_configs.py for its configuration",
        mfu=0.65,
    ),
}
"""By name."""


def saved(primitive: Any, *avals: Any, width: int, saves_mlp: bool, **params: Any):
    """Whether a layer saves a result: products of activations with weights are, but for
    those as wide as the MLP where `saves_mlp` is false."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    if not dots(primitive, *avals, **params):
        return False
    return saves_mlp or avals[1].shape[-1] != width


def compiled(name: str) -> Report:
    """The step of a published program, compiled and played."""
    anchor = ANCHORS[name]
    width, mesh = anchor.model.mlp_width, targets.mesh(anchor.target)
    policy = functools.partial(saved, width=width, saves_mlp=anchor.saves_mlp)
    step = functools.partial(
        programs.train_step, model=anchor.model, hand=Hand(policy=policy)
    )
    functools.update_wrapper(step, programs.train_step)
    state, batch = programs.arguments(anchor.model, mesh.size)
    return shardfn.fully_shard(step, mesh).on(
        anchor.target,
        state,
        batch,
        progress=lambda stage: print(f"{name}: {stage}", file=sys.stderr, flush=True),
    )


def row(name: str) -> dict[str, Any]:
    """The figures of a published program's step."""
    report = compiled(name)
    scores = sum(
        span.end - span.start
        for span in report.timeline.device
        if SCORES in span.op_name and span.kind not in (MATMUL, WAIT)
    )
    model_seconds = sum(report.flops.model.values()) / report.target.flops
    anchor = ANCHORS[name]
    return {
        "published": anchor.seconds or model_seconds / anchor.mfu,
        "predicted": report.step_seconds,
        "scores": scores,
        "matmuls": report.compute_seconds,
        "memory": report.memory_seconds,
        "exposed": report.exposed_seconds,
        "model": model_seconds,
        "peak": report.memory.peak,
        "jax": jax.__version__,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Milliseconds, and what is predicted as a share of what is published."""
    head = (
        *("program", "on", "published", "predicted", "of it scores", "the rest"),
        *("the rest / published", "matmuls alone", "exposed"),
    )
    lines = []
    for name, found in rows.items():
        rest = found["predicted"] - found["scores"]
        cells = (
            *(found["published"], found["predicted"], found["scores"], rest),
            *(found["matmuls"], found["exposed"]),
        )
        ms = [f"{1e3 * seconds:,.0f} ms" for seconds in cells]
        share = f"{rest / found['published']:.2f}"
        lines.append((name, ANCHORS[name].target, *ms[:4], share, *ms[4:]))
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=ANCHORS, action="append")
    parser.add_argument("--rerun", action="store_true")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in given.case or ANCHORS:
        if given.rerun or name not in rows:
            rows[name] = row(name)
            RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(table({name: rows[name] for name in ANCHORS if name in rows}))
    for name, anchor in ANCHORS.items():
        print(f"\n{name}: {anchor.source}.")


if __name__ == "__main__":
    main()
