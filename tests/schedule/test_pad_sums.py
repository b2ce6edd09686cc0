"""In: loops over layers whose gradients have rows of several lengths. Out: the sums
that are padded, the plain step's numbers, and programs compiled for v5ps, in which they
are reduce-scattered, as those of other rows are without it.
"""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest
from compilers import aot
from plan_helpers import cpu_mesh, shard

import shardfn
from shardfn._core import compat
from shardfn._core.plan import Reshard
from shardfn._core.sharding import Split, is_unreduced
from shardfn._schedule import pad_sums, quantize_moves
from shardfn._schedule.bodies import all_moves
from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives
from shardfn.testing import assert_parity

V5PS = "tpu:v5p:4x4x4"
LAYERS = 3
OPTIONS: dict[str, Any] = {"stationary": False, "min_size": 8}


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CPUs are planned for as large slices of v5ps are: rows of tiles whose largest
    prime factor is 3 can be summed over eight devices."""
    monkeypatch.setattr(compat, "sums_in_pieces", lambda device: True)
    monkeypatch.setattr(pad_sums, "PIECES_DEVICES", 8)
    monkeypatch.setattr(pad_sums, "PIECES_MOST", 3 * 8)
    monkeypatch.setattr(pad_sums, "PIECES_PADDING", Fraction(1, 4))
    monkeypatch.setattr(pad_sums, "CHAINED_BYTES", 2**12)
    monkeypatch.setattr(pad_sums, "TPU_TILE", (1, 8))
    return monkeypatch


def train(state: Any, x: jax.Array) -> Any:
    """A step that trains layers of two products each."""

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        inner = jnp.tanh(h @ w["wide"].astype(h.dtype))
        return h + inner @ w["back"].astype(h.dtype), None

    def loss_fn(state: Any) -> jax.Array:
        h, _ = jax.lax.scan(jax.checkpoint(layer), x, state)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


def weights(width: int, hidden: int, make: Any = jnp.ones) -> Any:
    return {
        "wide": make((LAYERS, width, hidden), jnp.float32),
        "back": make((LAYERS, hidden, width), jnp.float32),
    }


def padded(step: Any, *args: Any) -> list[tuple[int | None, tuple[int, ...]]]:
    """Along which dimension sums are padded, and to which shapes."""
    moves = all_moves(step.plan(*args).body)
    return [(m.padded, m.shape) for m in moves if m.padded is not None]


@pytest.mark.parametrize(
    "hidden, sizes",
    [
        (40, [48, 48]),  # 5 tiles
        (37, [48, 48]),  # 5 as well, of which the last is not full
        (48, []),
        (104, [128]),  # 13, and 14 and 15 are no better; the other is split along them
    ],
)
def test_rows_with_a_large_prime_factor_are_padded(
    pieces: pytest.MonkeyPatch, hidden: int, sizes: list[int]
) -> None:
    step = shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS)
    args = weights(64, hidden), jnp.ones((16, 64))
    assert sorted(shape[dim] for dim, shape in padded(step, *args)) == sizes


@pytest.mark.parametrize(
    "name, value",
    [
        ("PIECES_DEVICES", 9),
        ("PIECES_MOST", 5 * 8),
        ("PIECES_MOST", 2 * 8 - 1),  # no row can be summed in pieces
        ("CHAINED_BYTES", 64 * 40 * 4 + 1),
        ("PIECES_PADDING", Fraction(1, 6)),
    ],
)
def test_those_of_few_devices_or_bytes_are_not(
    pieces: pytest.MonkeyPatch, name: str, value: int
) -> None:
    args = weights(64, 40), jnp.ones((16, 64))
    assert padded(shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS), *args)
    pieces.setattr(pad_sums, name, value)
    assert not padded(shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS), *args)


@pytest.mark.parametrize(
    "mesh, options",
    [((2, 4), {}), ((8,), {"reduce_dtype": "int8", "quantize_block": 8})],
    ids=["over replicas too", "quantized"],
)
def test_other_moves_are_not(
    pieces: pytest.MonkeyPatch, mesh: tuple[int, ...], options: dict[str, Any]
) -> None:
    pieces.setattr(quantize_moves, "QUANTIZED_ELEMENTS", 1)
    pieces.setattr(pad_sums, "PIECES_DEVICES", 4)
    pieces.setattr(pad_sums, "PIECES_MOST", 3 * mesh[-1])
    devices = cpu_mesh(*mesh)
    options = {**OPTIONS, "axis": devices.axis_names, **options}
    step = shardfn.fully_shard(train, devices, **options)
    args = weights(64, 40), jnp.ones((16, 64))
    assert not padded(step, *args)
    moves = [m for m in step.plan(*args).collectives if m.phase == "backward"]
    assert {m.op for m in moves} & {"all_reduce", "all_to_all"}


@pytest.mark.standard_promotion
def test_what_is_scattered_flattened_is_not(pieces: pytest.MonkeyPatch) -> None:
    """It has no rows."""
    pieces.setattr(pad_sums, "TPU_TILE", (1, 1))
    sharded = shard(programs.get("gpt_scan_remat"), cpu_mesh(8), min_size=8)
    sums = [m for m in all_moves(sharded.plan.body) if summed_flat(m)]
    assert (163, 36) in {m.shape for m in sums}
    assert all(m.padded is None for m in sums)


def summed_flat(step: Reshard) -> bool:
    ends = [s for s in step.path[-1] if isinstance(s, Split)]
    return any(s.dim < 0 for s in ends) and is_unreduced(step.path[0])


def test_elsewhere_none_is(pieces: pytest.MonkeyPatch) -> None:
    pieces.setattr(compat, "sums_in_pieces", lambda device: False)
    args = weights(64, 40), jnp.ones((16, 64))
    assert not padded(shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS), *args)


def test_which_devices_sum_in_pieces() -> None:
    kinds = ["TPU v5p", "TPU v5", "TPU v5 lite", "TPU v6 lite", "NVIDIA H100", "cpu"]
    devices = [SimpleNamespace(device_kind=kind) for kind in kinds]
    found = [compat.sums_in_pieces(device) for device in devices]
    assert found == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    "tiles, devices, fits",
    [(23, 64, True), (29, 64, False), (86, 64, False), (88, 64, True), (90, 64, True)]
    + [(13, 128, True), (23, 128, False), (96, 512, True), (5, 512, False)]
    + [(1, 512, True), (1, 4096, False), (169, 64, True)],
)
def test_rows_that_libtpu_cuts_into_pieces(
    tiles: int, devices: int, fits: bool
) -> None:
    assert pad_sums.fits_pieces(tiles, devices) == fits


def heads(state: Any, x: jax.Array) -> Any:
    """A step with weights `[D, heads, width]`, in a loop within a loop."""

    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(jnp.einsum("bd,dhk->bhk", h, w)).sum((1, 2))[:, None], None

    def rows(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(layer, h, w)[0], None

    def loss_fn(state: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(rows, x, state)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return state - 0.1 * grads, loss


def test_the_row_is_the_last_dimension_also_in_a_loop_in_a_loop(
    pieces: pytest.MonkeyPatch,
) -> None:
    args = jnp.ones((2, 2, 64, 3, 40)), jnp.ones((16, 64))
    step = shardfn.fully_shard(heads, cpu_mesh(8), **OPTIONS)
    assert padded(step, *args) == [(1, (3, 48, 64))]
    assert_parity(heads, cpu_mesh(8), *args, **OPTIONS)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """CPUs are planned for as TPUs are, whose tiles have four rows of float32 here."""
    monkeypatch.setattr(compat, "scatters_tiles", lambda platform: True)
    monkeypatch.setattr(pad_sums, "CHAINED_BYTES", 2**10)
    monkeypatch.setattr(pad_sums, "TPU_TILE", (4, 8))
    return monkeypatch


@pytest.mark.parametrize("stored, dim", [(1, 1), (2, 0)])
@pytest.mark.parametrize(
    "width, dtype, filled",
    [
        (40, jnp.float32, 64),  # five rows of each device, as eight
        (72, jnp.bfloat16, 96),
        (32, jnp.float32, None),
        (24, jnp.float32, None),  # less than a tile
    ],
)
def test_each_part_of_a_sum_fills_tiles(
    tiles: pytest.MonkeyPatch,
    width: int,
    dtype: Any,
    filled: int | None,
    stored: int,
    dim: int,
) -> None:
    """Along either dimension of a tile."""
    options = OPTIONS | {"shard": {"*": {"data": stored}}}
    step = shardfn.fully_shard(train, cpu_mesh(8), **options)
    keys = iter(jax.random.split(jax.random.key(0), 3))
    state = weights(width, width, lambda *a: jax.random.normal(next(keys), *a) / 8)
    args = state, jax.random.normal(next(keys), (16, width), dtype)
    found = [(dim, shape[dim]) for dim, shape in padded(step, *args)]
    assert found == ([(dim, filled)] * 2 if filled else [])
    assert_parity(train, cpu_mesh(8), *args, steps=3, **options)
    if filled:
        plan = step.plan(*args)
        assert plan.verify(step.lower(*args).compile()).ok
        assert "in tiles of" in plan.explain("back")


@pytest.mark.parametrize(
    "name, value",
    [("CHAINED_BYTES", 40 * 40 * 4 + 1), ("TILED_BYTES", 40 * 40 * 4 - 1)],
)
def test_parts_of_small_and_of_large_sums_are_left(tiles, name: str, value) -> None:
    tiles.setattr(pad_sums, name, value)
    args = weights(40, 40), jnp.ones((16, 40))
    assert not padded(shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS), *args)


@pytest.mark.aot("tpu:v5p:2x2x2")
@pytest.mark.parametrize(
    "rows, pads", [(140, True), (140, False), (420, True), (7 * 16 * 4, True)]
)
def test_libtpu_sends_rows_on_unless_parts_fill_tiles(monkeypatch, rows, pads) -> None:
    """Once it does not, the pass can go. A sum of 28 MB is left to it."""
    if not pads:
        monkeypatch.setattr(compat, "scatters_tiles", lambda platform: False)
    mesh = targets.mesh("tpu:v5p:2x2x2")
    state = weights(8 * rows, 8 * rows, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct((8, 64, 8 * rows), jnp.bfloat16)
    step = shardfn.fully_shard(train, mesh, **OPTIONS)
    compiled = step.lower(state, x).compile()
    found = {c.op for c in read_collectives(compiled.as_text() or "")}
    small = rows == 140
    assert bool(padded(step, state, x)) == (small and pads)
    left_to_it = rows % 8 != 0 and not (small and pads)
    assert ("ppermute" in found) == left_to_it
    checked = step.plan(state, x).verify(compiled)
    # It all-reduces the small ones, where it pads them.
    assert checked.ok == (pads or not small)
    assert bool(checked.having("tiled")) == (left_to_it and checked.ok)


def test_a_plan_says_so(pieces: pytest.MonkeyPatch) -> None:
    """With the bytes that are sent; and the compiled program sends as many."""
    step = shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS)
    args = weights(64, 40), jnp.ones((16, 64))
    plan = step.plan(*args)
    sums = [c for c in plan.collectives if c.op == "psum_scatter"]
    (line,) = [c for c in sums if c.path == "wide"]
    assert line.shape == (48, 64)
    assert line.wire_bytes == 48 * 64 * 4 * 7 // 8
    said = plan.explain("wide")
    assert "is padded from 40 to 48 along dimension 0 (limits.PIECES_PADDING" in said
    assert ": 1/4 at most): over 8 TPUs (limits.PIECES_DEVICES: 8 or more) " in said
    assert "rows of 5 tiles, with the prime factor 5, cannot be summed in pi" in said
    assert "(limits.PIECES_MOST: 24)" in said
    assert plan.verify(step.lower(*args).compile()).ok


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [37, 40])
def test_steps_compute_what_the_plain_one_does(
    pieces: pytest.MonkeyPatch, hidden: int, dtype: str
) -> None:
    keys = iter(jax.random.split(jax.random.key(0), 3))
    state = weights(64, hidden, lambda *a: jax.random.normal(next(keys), *a) / 8)
    x = jax.random.normal(next(keys), (16, 64), dtype)
    step = shardfn.fully_shard(train, cpu_mesh(8), **OPTIONS)
    assert padded(step, state, x)
    assert_parity(train, cpu_mesh(8), state, x, steps=3, **OPTIONS)


@pytest.mark.parametrize(
    "target, tiles, pads, scatters",
    [
        aot(V5PS, 29, True, True),
        aot(V5PS, 29, False, False, exhaustive=True),
        aot(V5PS, 23, True, True, exhaustive=True),
        aot("tpu:v5p:4x4x8", 13, False, True, exhaustive=True),
        aot("tpu:v5p:4x4x8", 23, False, False, exhaustive=True),
        aot("tpu:v5p:8x8x8", 3, False, True, exhaustive=True),
        aot("tpu:v5p:8x8x8", 5, False, False, exhaustive=True),
    ],
)
def test_tpus_reduce_scatter_them(
    monkeypatch: pytest.MonkeyPatch, target: str, tiles: int, pads: bool, scatters: bool
) -> None:
    """Once those with 29 tiles are scattered without it, the pass can go."""
    monkeypatch.setattr(compat, "sums_in_pieces", lambda device: pads)
    mesh = targets.mesh(target)
    width = 16 * mesh.size
    state = weights(width, 128 * tiles, jax.ShapeDtypeStruct)
    x = jax.ShapeDtypeStruct((mesh.size, 64, width), jnp.bfloat16)
    step = shardfn.fully_shard(train, mesh, **OPTIONS)
    moves = all_moves(step.plan(state, x).body)
    notes = [note for move in moves for note in move.notes]
    said = ["in pieces" in note.text for note in notes if note.by == "pad_sums"]
    assert said.count(True) == (pads and tiles == 29)
    text = step.lower(state, x).compile().as_text() or ""
    large = [c.op for c in read_collectives(text) if c.elements >= width * 128 * tiles]
    assert ("all_reduce" in large) != scatters
    assert "psum_scatter" in large or not scatters
