"""A transformer compiled for GPUs and TPUs that are not there: the collectives of its
plan, and nothing else, are in the optimized programs.
"""

import re
from collections import Counter

import jax.numpy as jnp
import pytest
from plan_helpers import (
    Moves,
    Sharded,
    combined_sums,
    hlo_moves,
    planned_moves,
    shard_gpt,
)
from programs import gpt

from shardfn import targets
from shardfn._hlo import read_collectives, wire_bytes

pytestmark = [pytest.mark.aot, pytest.mark.standard_promotion]

H100, V5E = "h100:8", "tpu:v5e:2x4"
ROWS, LENGTH, WIDTH, HIDDEN, VOCAB = 24, 128, 256, 1024, 1024
# Every matrix has more elements, and every stack of norm scales and biases fewer.
MIN_SIZE = 2**13
MODELS = {
    "scan_remat": dict(scan=True, remat=True, layers=4, broadcast_mask=True),
    "unrolled": dict(layers=2),
}


def target(name: str):
    """A target, skipped where its compiler is not installed."""
    reason = targets.missing(name)
    return pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))


def make(model: str, name: str) -> Sharded:
    config = gpt.Config(
        **dict(vocab=VOCAB, length=LENGTH, width=WIDTH, hidden=HIDDEN),
        **MODELS[model],
        dtype=jnp.bfloat16,
    )
    return shard_gpt(config, targets.mesh(name), rows=ROWS, min_size=MIN_SIZE)


def kept_in_part(compiled: Moves, planned: Moves) -> Moves:
    """The moves with sums of whole gradients written as the reduce-scatters they stand
    for.

    The TPU compiler does some reduce-scatters as an all-reduce that every device takes
    its part of: those along the dimension that lies in lanes, and one that it combines
    with all-reduces of small leaves. That is twice the bytes for each of them.
    """
    scattered = {key[1:] for key in planned if key[0] == "psum_scatter"}
    found: Moves = Counter()
    for (op, *rest), times in compiled.items():
        is_whole = op == "psum" and tuple(rest) in scattered
        found["psum_scatter" if is_whole else op, *rest] += times
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [target(H100), target(V5E)])
def test_the_plan_is_compiled(model: str, name: str) -> None:
    """Every gather of the plan, forward and backward, and every sum; nothing else."""
    sharded = make(model, name)
    text = sharded.compile().as_text()
    found = read_collectives(text)
    planned, compiled = planned_moves(sharded.plan), hlo_moves(found)
    sent = wire_bytes(found) / sharded.plan.wire_bytes
    if name == H100:
        # Small all-reduces of one dtype are concatenated.
        assert combined_sums(compiled) == combined_sums(planned)
        assert sent == 1
    else:
        assert kept_in_part(compiled, planned) == planned
        assert 1 <= sent < 1.2
    moved = {dtype for op, dtype, *_ in compiled if op != "psum"}
    assert moved == {"bfloat16"}
    # Law 4: no array of the global batch.
    assert f"[{ROWS // 8}," in text
    assert not re.search(rf"\[(\d+,)*{ROWS}(,\d+)*\]\{{", text)
