"""In: steps whose memory one can work out, and programs that were compiled for v5ps.
Out: what is known of how libtpu uses memory, each fact by itself, and what their plans
say that they take.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from plan_helpers import cpu_mesh
from tiers import tiered

import shardfn
from shardfn._lowering import choose_offload
from shardfn._lowering.heap import heap_of
from shardfn._schedule.heap import Heap
from shardfn._schedule.peak_bytes import peak_bytes
from shardfn.analysis import targets

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
V5P = "tpu:v5p:2x2x2"
TENTH = 0.1
HALF, FLOAT = 2, 4
ROWS, WIDTH, LAYERS, VOCABULARY = 64, 128, 16, 4096
WIDER = 4 * VOCABULARY
LOCAL = ROWS // 8

Account = Callable[..., int]


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    """What gradient descent on a loss takes by its plan, with a heap."""

    def taken(loss: Any, params: Any, batch: Any, heap: Heap) -> int:
        given: list[tuple[Any, ...]] = []

        def record(*args: Any) -> int:
            given.append(args)
            return peak_bytes(*args)

        def train(params: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - g, params, grads), value

        monkeypatch.setattr(choose_offload, "peak_bytes", record)
        step = shardfn.fully_shard(
            train, cpu_mesh(8), offload="1GiB", stationary=False, min_size=16
        )
        assert step.plan(params, batch).offload
        program, body, axes, _ = given[-1]
        return peak_bytes(program, body, axes, heap)

    return taken


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def narrow_layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ w.astype(jnp.bfloat16)), None

    h, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), weights)
    return jnp.sum(h.astype(jnp.float32))


def test_a_stack_is_cast_once_for_the_loops_of_both_passes(account: Account) -> None:
    given = narrow_layers, floats(LAYERS, WIDTH, WIDTH), floats(ROWS, WIDTH)
    more = account(*given, Heap(casts_stacks=True)) - account(*given, Heap())
    assert more == LAYERS * WIDTH * WIDTH // 8 * HALF


def test_stacks_that_are_read_as_they_are_are_not_cast(account: Account) -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0].sum()

    given = loss, floats(LAYERS, WIDTH, WIDTH), floats(ROWS, WIDTH)
    assert account(*given, Heap(casts_stacks=True)) == account(*given, Heap())


def test_the_gradient_of_a_picked_logit_is_a_comparison(account: Account) -> None:
    """A scatter writes into the softmax's term, which is in memory in float32 then."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        narrow = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        logits = narrow.astype(jnp.float32)
        labels = jnp.zeros((ROWS, 1), jnp.int32)
        picked = jnp.take_along_axis(logits, labels, axis=1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1, keepdims=True) - picked)

    given = loss, floats(2, VOCABULARY), floats(ROWS, 2)
    less = account(*given, Heap()) - account(*given, Heap(compares=True))
    term = LOCAL * VOCABULARY * FLOAT
    assert 0.8 * term < less < 1.1 * term


def test_an_addition_at_no_index_is_no_comparison(account: Account) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.zeros(LOCAL).at[()].add(x[:LOCAL, 0] * w[0, 0]))

    given = loss, floats(2, VOCABULARY), floats(ROWS, 2)
    assert account(*given, Heap(compares=True)) == account(*given, Heap())


def test_a_relu_is_written_over_what_it_is_of(account: Account) -> None:
    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        made = x @ w["in"]
        return jnp.mean(jax.nn.relu(made * made) @ w["out"])

    given = loss, {"in": floats(2, VOCABULARY), "out": floats(VOCABULARY, 2)}
    given = *given, floats(ROWS, 2)
    assert account(*given, Heap(inlines=True)) < account(*given, Heap())


@pytest.mark.parametrize("rows, in_byte", [((ROWS,), 1), ((16, 4), 2), ((128, 1), 8)])
def test_signs_of_what_a_relu_is_of_are_kept_several_in_a_byte(
    account: Account, rows: tuple[int, ...], in_byte: int
) -> None:
    """They are all that its derivative needs; the numbers end with the ReLU, before
    more is made. Of rows in one dimension, libtpu keeps the numbers."""

    def loss(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        thin = jax.nn.relu(x @ w["in"]) @ w["out"]
        return jnp.mean(jnp.tanh(thin @ w["wider"]))

    shapes = {"in": (2, VOCABULARY), "out": (VOCABULARY, 2), "wider": (2, WIDER)}
    weights = {name: floats(*shape) for name, shape in shapes.items()}
    given = loss, weights, floats(*rows, 2)
    less = account(*given, Heap(inlines=True))
    less -= account(*given, Heap(inlines=True, packs_masks=True))
    numbers = math.prod(rows) // 8 * VOCABULARY
    assert less == (numbers * FLOAT - numbers // in_byte if in_byte > 1 else 0)


@pytest.mark.parametrize("width, padded", [(32, True), (64, False)])
def test_gathers_of_less_than_a_tile_are_padded(
    account: Account, width: int, padded: bool
) -> None:
    """A device of 8 has four rows or columns of a matrix, of the eight of a tile, or
    all of them."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w))

    given = loss, floats(width, width), floats(8, width)
    more = account(*given, Heap(pads_gathers=True)) - account(*given, Heap())
    assert (more > 0) == padded


@pytest.mark.aot(V5P)
def test_all_of_it_is_known_of_tpus() -> None:
    heap = heap_of(tuple(targets.mesh(V5P).devices.flat), {})
    assert not heap.delays_sums and heap.holes
    assert heap.casts_stacks and heap.compares and heap.inlines and heap.pads_gathers
    assert heap.packs_masks


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import estimated_memory

    return estimated_memory


SCANNED = sorted(
    path.stem
    for path in (BENCHMARKS / "results" / "v5p").glob("[glt]*.json")
    if "temp" in json.loads(path.read_text()).get("shardfn", {})
    and "unrolled" not in path.stem  # libtpu lets the sums of their layers wait
)


@pytest.mark.aot(V5P)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", tiered(tuple(SCANNED), ("gpt-0.9b-8",)))
def test_estimates_of_scanned_layers_are_a_tenth_off_at_most(
    name: str, estimated: Any
) -> None:
    case = estimated.CASES[name]
    stored, planned = estimated.estimate(case.model, case.target("v5p"))
    found = stored + estimated.compiled("v5p", name, "shardfn")["temp"]
    assert abs(planned - found) <= TENTH * found
