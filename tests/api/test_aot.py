"""A transformer compiled for GPUs and TPUs that are not there: the collectives of its
plan, and nothing else, are in the optimized programs.
"""

import re
from collections import Counter
from typing import Any

import jax.numpy as jnp
import pytest
from compilers import aot
from plan_helpers import (
    Moves,
    Sharded,
    combined_sums,
    hlo_moves,
    planned_moves,
    shard_gpt,
)
from programs import gpt

from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives, wire_bytes

pytestmark = pytest.mark.standard_promotion

H100, V5E = "h100:8", "tpu:v5e:2x4"
ROWS = 24
SMALL = dict(vocab=512, length=128, width=128, hidden=512)
# Where gradients are moved as float32, the TPU compiler all-reduces the one of the
# positions as bfloat16 if it is smaller.
WIDE = dict(vocab=1024, length=128, width=256, hidden=1024)
# Every matrix has more elements, and every stack of norm scales and biases fewer.
MIN_SIZE = 2**13
MODELS = {
    "scan_remat": dict(scan=True, remat=True, layers=4, broadcast_mask=True),
    "unrolled": dict(layers=2),
}


def make(
    model: str,
    name: str,
    *,
    sizes: dict[str, int] = SMALL,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Sharded:
    config = gpt.Config(**sizes, **MODELS[model], dtype=dtype)
    return shard_gpt(
        config, targets.mesh(name), rows=ROWS, min_size=MIN_SIZE, **options
    )


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
        is_whole = op == "all_reduce" and tuple(rest) in scattered
        found["psum_scatter" if is_whole else op, *rest] += times
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [aot(H100), aot(V5E)])
def test_the_plan_is_compiled(model: str, name: str) -> None:
    """Every gather of the plan, forward and backward, and every sum; nothing else."""
    assert_compiled(make(model, name), name)


@pytest.mark.parametrize(
    "name, sizes", [aot(H100, SMALL), aot(V5E, WIDE, exhaustive=True)]
)
def test_kept_gathers_ahead_and_wide_sums_are_compiled(
    name: str, sizes: dict[str, int]
) -> None:
    """Layers are gathered one ahead, in the forward pass alone, and gradients move as
    float32."""
    options = dict(reshard_after_forward=False, prefetch=1, reduce_dtype="float32")
    sharded = make("scan_remat", name, sizes=sizes, **options)
    assert 5 in {c.times for c in sharded.plan.collectives}, "four layers, one ahead"
    lines = sharded.plan.collectives
    assert not any(c.op == "all_gather" and c.phase == "backward" for c in lines)
    assert {c.dtype for c in lines if c.op == "psum_scatter"} == {"float32"}
    assert_compiled(sharded, name)


@pytest.mark.parametrize("name", [aot(H100, exhaustive=True), aot(V5E)])
def test_repeated_gathers_in_a_narrow_dtype_are_compiled(name: str) -> None:
    """No gather is merged with one of the forward pass, and none moves float32."""
    options = dict(reshard_after_forward=True, gather_dtype="bfloat16")
    sharded = make("unrolled", name, dtype=jnp.float32, **options)
    lines = [c for c in sharded.plan.collectives if c.op == "all_gather"]
    assert {c.phase for c in lines} == {"forward", "backward"}
    assert {c.dtype for c in lines} == {"bfloat16"}
    assert_compiled(sharded, name)


def assert_compiled(sharded: Sharded, name: str) -> None:
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
    checked = sharded.plan.verify(text)
    assert checked.extra == () and checked.wire_bytes == wire_bytes(found)
    statuses = {c.status for c in checked.lines}
    assert statuses <= {"present", "all-reduced"}
    turned = {c.line.op for c in checked.having("all-reduced")}
    assert turned <= (set() if name == H100 else {"psum_scatter"})
    assert checked.ok == (not turned)
    for op in ("all_gather", "psum_scatter"):
        moved = {dtype for kind, dtype, *_ in compiled if kind == op}
        assert moved == {c.dtype for c in sharded.plan.collectives if c.op == op}
    # Law 4: no array of the global batch.
    assert f"[{ROWS // 8}," in text
    assert not re.search(rf"\[(\d+,)*{ROWS}(,\d+)*\]\{{", text)
