"""In: loops over layers that compute more or less behind each gradient. Out: gradients
that are summed before their iteration ends are marked, in the plan and for compilers
that would delay them; the others are not.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from jax import lax
from layered import HIDDEN, KINDS, ROWS, STATE, UNROLLED, train
from plan_helpers import Sharded, cpu_mesh, shard_fn

from shardfn._core import limits
from shardfn._core.moves import ReduceScatter
from shardfn._core.plan import Apply, BodyPlan, Reshard
from shardfn._lowering import interpreter
from shardfn._schedule import chain_reduce_scatters, narrow_stacks, undelayed_sums
from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives
from shardfn.testing import assert_same

LAYERS = 4


def chain(*widths: int, remat=True, product=jnp.matmul, dtype=jnp.bfloat16):
    """A step that trains layers, each of them products with weights of these widths one
    after the other, and its state."""
    names = [f"w{i}" for i in range(len(widths) - 1)]

    def layer(h, w):
        before = h
        for name in names:
            h = jnp.tanh(product(h, w[name].astype(h.dtype)))
        return before + h, None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss_fn(state, x):
        h, _ = lax.scan(body, x.astype(dtype), state)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    shapes = zip(widths, widths[1:], strict=False)
    state = {k: (LAYERS, *s) for k, s in zip(names, shapes, strict=True)}
    return step, state


def moves(body: BodyPlan) -> Iterator[Reshard]:
    for step in body.steps:
        if isinstance(step, Reshard):
            yield step
        elif isinstance(step, Apply):
            for inner in step.bodies:
                yield from moves(inner)


def scattered(case: Sharded) -> list[Reshard]:
    found = moves(case.plan.body)
    return [m for m in found if any(isinstance(x, ReduceScatter) for x in m.moves)]


def marks(case: Sharded) -> list[bool]:
    """Of the sums in their order, whether each may not be delayed."""
    return [move.undelayed for move in scattered(case)]


def chained(*widths: int, **options: Any) -> Sharded:
    step, state = chain(*widths, **options)
    return shard_fn(step, cpu_mesh(8), state, (16, widths[0]))


@pytest.mark.parametrize(
    ("count", "remat", "ending"),
    [(1, True, 0), (2, True, 1), (3, True, 1), (4, True, 2), (6, True, 3), (8, True, 5)]
    + [(1, False, 0), (2, False, 1), (3, False, 2), (4, False, 3), (6, False, 5)],
)
def test_the_first_sums_of_an_iteration_end_in_it(count, remat, ending) -> None:
    case = chained(*[16] * (count + 1), remat=remat)
    assert marks(case) == [True] * ending + [False] * (count - ending)


def test_what_ends_depends_on_its_bytes_and_on_what_is_computed_behind_it() -> None:
    # The first gradients are those of the last weights.
    assert marks(chained(16, 16, 16, 256, 16)) == [True, False, False, False]
    assert marks(chained(16, 256, 16, 16, 16)) == [True, True, True, False]


def test_sums_in_an_iteration_that_computes_no_products_may_be_delayed() -> None:
    def loss_fn(scales, x):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h * w), None), x, scales)
        return jnp.mean(h**2)

    def step(scales, x):
        return scales - jax.grad(loss_fn)(scales, x), ()

    case = shard_fn(step, cpu_mesh(8), (LAYERS, 16), (16, 16))
    assert marks(case) == [False]


def test_what_takes_longer_ends_later(monkeypatch) -> None:
    found = []
    for time in (0.25, 0.5, 1, 2, 8):
        monkeypatch.setattr(undelayed_sums, "SUMS_TIME", time)
        found.append(sum(marks(chained(*[16] * 7))))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[2] == 3 > found[-1] == 0


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_only_loops_over_layers_have_such_sums(kind, microbatches) -> None:
    state = STATE if "scan" in kind else UNROLLED
    case = shard_fn(train(kind, microbatches), cpu_mesh(8), state, ROWS)
    looped = [m for m in scattered(case) if len(m.shape) == 2 and HIDDEN in m.shape]
    ending = [move.undelayed for move in looped]
    # `down` is used last, so its gradient is made first.
    assert ending == ([True, False] if "scan" in kind else [False, False] * 3)


@pytest.mark.parametrize("bucket_bytes", [0, 2**20])
def test_sums_that_are_one_collective_end_together(bucket_bytes) -> None:
    step, state = chain(*[16] * 7)
    case = shard_fn(step, cpu_mesh(8), state, (16, 16), bucket_bytes=bucket_bytes)
    groups: dict[Any, set[bool]] = {}
    for move in scattered(case):
        groups.setdefault(move.together or move.result, set()).add(move.undelayed)
    assert all(len(group) == 1 for group in groups.values())
    assert len(groups) == (1 if bucket_bytes else 6)


def test_the_plan_says_why() -> None:
    case = chained(*[16] * 4)
    [marked] = [move for move in scattered(case) if move.undelayed]
    assert undelayed_sums.ENDS in marked.notes
    assert f"limits.SUMS_TIME: {limits.SUMS_TIME}" in undelayed_sums.ENDS.text


def values(case: Sharded) -> tuple[Any, Any]:
    """A state and a batch."""
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), case.state)
    return state, rng.standard_normal(case.batch.shape, np.float32)


def stepped(case: Sharded) -> Any:
    """The state after three steps."""
    state, batch = values(case)
    state = case.step.shard(state)
    for _ in range(3):
        state, _ = case.step(state, batch)
    return state


def test_a_step_is_the_plain_one() -> None:
    case = chained(*[16] * 7)
    assert sum(marks(case)) == 3
    state, batch = values(case)
    given = case.step.shard(state)
    for number in range(3):
        state, loss = jax.jit(case.plain)(state, batch)
        given, found = case.step(given, batch)
        assert_same((state, loss), (case.step.unshard(given), found), f"step {number}")


@pytest.mark.parametrize("target", [aot("h100:8")])
def test_the_compiler_holds_less(target, monkeypatch) -> None:
    """Without the barriers it carries every term into the next iteration. XLA of jax
    0.12 carries none of stacks in bfloat16."""
    monkeypatch.setattr(narrow_stacks, "NARROW_STACKS", 1)
    widths, rows = [2048] * 7, 8 * 1024
    step, state = chain(*widths)
    temporary, copies = {}, {}
    for delays in (False, True):
        if delays:
            monkeypatch.setattr(interpreter, "undelayed_on_gpus", lambda x: x)
        case = shard_fn(step, targets.mesh(target), state, (rows, widths[0]))
        lowered = case.step.lower(case.state, case.batch)
        text = lowered.as_text()
        copies[delays] = text.count("optimization_barrier")
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        temporary[delays] = analysis.temp_size_in_bytes
    assert copies[False] == copies[True] + 3
    term = 2 * 2048 * 2048  # XLA of jax 0.12 carries one, that of 0.10 six
    assert temporary[False] < temporary[True] - term // 2


@pytest.mark.parametrize("target", [aot("tpu:v5e:2x2")])
def test_a_compiler_that_delays_nothing_is_told_nothing(target) -> None:
    step, state = chain(*[128] * 4)
    case = shard_fn(step, targets.mesh(target), state, (16, 128))
    assert not any(marks(case))


@pytest.mark.parametrize(
    ("target", "ending"), [aot("a100:8", 0), aot("h100:8", 1), aot("b200:8", 1)]
)
def test_a_compiler_that_does_not_time_transfers_delays_all(target, ending) -> None:
    step, state = chain(*[128] * 4)
    case = shard_fn(step, targets.mesh(target), state, (16, 128))
    assert sum(marks(case)) == ending


def ordered(case: Sharded) -> list[bool]:
    """Of the sums in their order, whether each waits for the one before it."""
    waits = [move.after for move in scattered(case)]
    results = [move.result for move in scattered(case)]
    return [after in results[:i] for i, after in enumerate(waits)]


@pytest.mark.parametrize("remat", [True, False])
def test_all_end_one_after_the_other_where_much_is_computed(remat, monkeypatch) -> None:
    monkeypatch.setattr(undelayed_sums, "SUMS_PART", 1)
    monkeypatch.setattr(undelayed_sums, "SUMS_FLOPS", 1)
    case = chained(*[1024] * 4, remat=remat)
    assert marks(case) == [True] * 3
    assert ordered(case) == [False, True, True]
    assert "(limits.SUMS_FLOPS: 1 or more)" in str(case.plan.explain("w0"))


def test_sums_that_are_small_or_computed_too_fast_are_not_ordered(monkeypatch) -> None:
    found = []
    for part, flops in [(2**18, 1), (2**18 + 1, 1), (1, 16), (1, 17)]:
        monkeypatch.setattr(undelayed_sums, "SUMS_PART", part)
        monkeypatch.setattr(undelayed_sums, "SUMS_FLOPS", flops)
        # A device has 2 rows, and parts of 1024 x 1024 / 8 in bfloat16. There are three
        # products with each weight, or four if its layer has others behind it.
        found.append(all(marks(chained(*[1024] * 4))))
    assert found == [True, False, False, False]


def test_sums_that_wait_are_the_same_to_the_bit(monkeypatch) -> None:
    monkeypatch.setattr(chain_reduce_scatters, "CHAINED_BYTES", 1)
    monkeypatch.setattr(undelayed_sums, "SUMS_PART", 1)
    made = []
    for flops, waits in [(1, True), (10**9, False)]:
        monkeypatch.setattr(undelayed_sums, "SUMS_FLOPS", flops)
        case = chained(*[16] * 4, dtype=jnp.float32)
        assert ordered(case) == [False, waits, waits]
        made.append(case.step.unshard(stepped(case)))
    assert_same(*made, "ordered and not", tol=0)


@pytest.mark.parametrize("target", [aot("h100:8")])
def test_a_compiler_peels_no_iteration_off_where_all_end(target, monkeypatch) -> None:
    """And it combines no sums, so that each can begin when its term is there."""
    widths, rows = [1024] * 5, 8 * 4096
    step, state = chain(*widths)
    products, temporary, sums = {}, {}, {}
    for flops in (limits.SUMS_FLOPS, 10**9):
        monkeypatch.setattr(undelayed_sums, "SUMS_FLOPS", flops)
        monkeypatch.setattr(undelayed_sums, "SUMS_PART", 2**18)
        case = shard_fn(step, targets.mesh(target), state, (rows, widths[0]))
        compiled = case.step.lower(case.state, case.batch).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        text = compiled.as_text()
        products[flops] = text.count("gemm_fusion_dot_") + text.count(" custom-call(")
        temporary[flops] = analysis.temp_size_in_bytes
        moved = read_collectives(text)
        sums[flops] = [c for c in moved if c.op == "psum_scatter" and c.times > 1]
    ours, delayed = sorted(products)
    assert products[ours] < products[delayed]
    assert temporary[ours] < temporary[delayed]
    assert len(sums[ours]) == 4
