"""Temporary memory over a compiled schedule: who lies where, and until when."""

import jax
import jax.numpy as jnp
import pytest
from layered import train
from test_hlo_text import module
from test_timeline import ENTRY, LOOP, ROUND

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo.live import live_bytes
from shardfn.analysis._hlo.parse import parse_module
from shardfn.analysis._hlo.play import play

ONE = 64 * 128 * 4


def arrays(entry: str, *others: str) -> dict[str, int]:
    """Arrays of [64, 128] that live at each instruction of the entry computation."""
    parsed = parse_module(module(entry, *others))
    live = live_bytes(parsed.entry, parsed)
    return {name: size // ONE for name, size in live.items()}


def test_it_follows_the_schedule() -> None:
    """The carry is `y`'s memory, in which the body leaves its result; `m` is written
    over the loop's, a view of it."""
    live = arrays(ENTRY.replace(", TRIPS", ""), LOOP)
    assert [live[name] for name in ("n", "y", "t", "w", "v", "m")] == [0, 1, 1, 1, 1, 1]
    found = play(module(ENTRY.replace(", TRIPS", ""), LOOP), ROUND)
    assert max(b for _, b in found.live) == ONE


@pytest.mark.parametrize(
    "made, most",
    [
        ("f32[64,128] negate(%y)", 1),
        ("f32[64,128] copy(%y)", 1),
        ("f32[128,64] transpose(%y), dimensions={1,0}", 2),
        ("bf16[64,128] convert(%y)", 1),  # half of it more
    ],
)
def test_what_is_made_element_by_element_is_written_over(made, most) -> None:
    entry = f"""
  %x = f32[64,128] parameter(0)
  %y = f32[64,128] sort(%x), dimensions={{0}}
  %m = {made}
"""
    assert arrays(entry)["m"] == most


def test_nothing_is_written_over_what_is_read_later() -> None:
    entry = """
  %x = f32[64,128] parameter(0)
  %y = f32[64,128] sort(%x), dimensions={0}
  %m = f32[64,128] negate(%y)
  %w = f32[64,128] multiply(%m, %y)
"""
    live = arrays(entry)
    assert (live["m"], live["w"]) == (2, 2)


FUSED = """
%fused (a: f32[64,128], b: f32[64,128]) -> (f32[64,128], f32[64,128]) {
  %a = f32[64,128] parameter(0)
  %b = f32[64,128] parameter(1)
  %s = f32[64,128] add(%a, %b)
  %t = f32[64,128] OF_BOTH
  ROOT %r = (f32[64,128], f32[64,128]) tuple(%s, %t)
}
"""


@pytest.mark.parametrize(
    "of_both, most",
    [
        ("multiply(%a, %b)", 2),  # each over one of them
        ("reverse(%a), dimensions={0}", 3),  # which reads all of `a`
    ],
)
def test_fusions_write_over_what_they_read_in_order(of_both, most) -> None:
    entry = """
  %x = f32[64,128] parameter(0)
  %y = f32[64,128] sort(%x), dimensions={0}
  %w = f32[64,128] sort(%x), dimensions={1}
  %f = (f32[64,128], f32[64,128]) fusion(%y, %w), kind=kLoop, calls=%fused
"""
    assert arrays(entry, FUSED.replace("OF_BOTH", of_both))["f"] == most


def test_of_several_results_each_lives_as_long_as_it_is_read() -> None:
    entry = """
  %x = f32[64,128] parameter(0)
  %f = (f32[64,128], f32[64,128]) fusion(%x, %x), kind=kLoop, calls=%fused
  %g = f32[64,128] get-tuple-element(%f), index=0
  %h = f32[64,128] get-tuple-element(%f), index=1
  %d = f32[128,64] transpose(%g), dimensions={1,0}
  %e = f32[64,128] sort(%h), dimensions={0}
"""
    live = arrays(entry, FUSED.replace("OF_BOTH", "multiply(%a, %b)"))
    assert (live["f"], live["d"], live["e"]) == (2, 3, 2)


def test_rows_are_added_to_an_array_in_its_place() -> None:
    scatter = """
%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %o = f32[] add(%p, %q)
}
%fused (a: f32[64,128], i: s32[4,1], u: f32[4,128]) -> f32[64,128] {
  %a = f32[64,128] parameter(0)
  %i = s32[4,1] parameter(1)
  %u = f32[4,128] parameter(2)
  ROOT %s = f32[64,128] scatter(%a, %i, %u), update_window_dims={1}, to_apply=%add
}
"""
    entry = """
  %x = f32[64,128] parameter(0)
  %i = s32[4,1] parameter(1)
  %u = f32[4,128] parameter(2)
  %y = f32[64,128] sort(%x), dimensions={0}
  %f = f32[64,128] fusion(%y, %i, %u), kind=kInput, calls=%fused
"""
    assert arrays(entry, scatter)["f"] == 1


@pytest.mark.aot("h100:8")
@pytest.mark.parametrize("kind", ["scan_remat", "unrolled"])
def test_the_highest_point_is_what_the_compiler_takes(kind) -> None:
    """Of layers in microbatches: loops in loops, and gradients added up in place. If
    nothing is written over, it is 1.08 and 1.46 of it."""
    wide = {"up": (8, 1024, 4096), "down": (8, 4096, 1024)}
    each = {name: shape[1:] for name, shape in wide.items()}
    layers = wide if "scan" in kind else [each] * 8
    state = {"layers": layers, "head": (1024, 64)}
    state = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        state,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    batch = jax.ShapeDtypeStruct((4 * 8 * 512, 1024), jnp.float32)
    step = shardfn.fully_shard(train(kind, microbatches=4), targets.mesh("h100:8"))
    report = step.on("h100:8", state, batch)
    highest = max(size for _, size in report.timeline.live)
    assert highest == pytest.approx(report.memory.temporary, rel=0.05)


def test_an_operand_lives_until_its_transfer_is_done() -> None:
    entry = """
  %x = f32[64,128] parameter(0)
  %y = f32[64,128] sort(%x), dimensions={0}
  %r = ((f32[64,128]), f32[8,128]) reduce-scatter-start(%y), dimensions={0}
  %v = f32[64,128] sort(%x), dimensions={1}
  %d = f32[8,128] reduce-scatter-done(%r)
  %w = f32[64,128] sort(%v), dimensions={0}
"""
    live = arrays(entry)
    assert (live["v"], live["w"]) == (2, 2)


def test_each_result_of_a_joined_transfer_has_its_own_memory() -> None:
    """An operation that writes over one of them still reads the other."""
    fused = """
%fused (a: f32[64,128], b: f32[128,128]) -> f32[64,128] {
  %a = f32[64,128] parameter(0)
  %b = f32[128,128] parameter(1)
  %c = f32[64,128] slice(%b), slice={[0:64], [0:128]}
  ROOT %s = f32[64,128] add(%a, %c)
}
"""
    entry = """
  %p = f32[8,128] parameter(0)
  %q = f32[16,128] parameter(1)
  %s = ((f32[8,128], f32[16,128]), (f32[64,128], f32[128,128])) all-gather-start(%p, %q)
  %d = (f32[64,128], f32[128,128]) all-gather-done(%s)
  %g = f32[64,128] get-tuple-element(%d), index=0
  %h = f32[128,128] get-tuple-element(%d), index=1
  %f = f32[64,128] fusion(%g, %h), kind=kLoop, calls=%fused
  %e = f32[64,128] sort(%f), dimensions={0}
"""
    live = arrays(entry, fused)
    assert (live["s"], live["f"], live["e"]) == (3, 3, 2)


def test_the_operand_that_ends_is_written_over() -> None:
    """Whichever place it has; arguments and what is read later stay."""
    entry = """
  %x = f32[64,128] parameter(0)
  %y = f32[64,128] sort(%x), dimensions={0}
  %a = f32[64,128] add(%x, %y)
  %v = f32[64,128] sort(%x), dimensions={1}
  %b = f32[64,128] add(%a, %v)
  %w = f32[64,128] sort(%a), dimensions={1}
"""
    live = arrays(entry)
    assert (live["a"], live["b"]) == (1, 2)


def test_a_copy_into_another_layout_takes_memory_of_its_own() -> None:
    entry = """
  %x = f32[64,128]{1,0} parameter(0)
  %y = f32[64,128]{1,0} sort(%x), dimensions={0}
  %m = f32[64,128]LAYOUT copy(%y)
"""
    sizes = [arrays(entry.replace("LAYOUT", x))["m"] for x in ("{1,0}", "{0,1}")]
    assert sizes == [1, 2]


def test_a_copy_to_other_memory_is_what_it_makes() -> None:
    entry = """
  %x = f32[64,128]{1,0} parameter(0)
  %y = f32[64,128]{1,0} sort(%x), dimensions={0}
  %s = (f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]) copy-start(%y)
  %d = f32[64,128]{1,0:S(1)} copy-done(%s)
  %t = (f32[64,128]{1,0}, f32[64,128]{1,0:S(1)}, u32[]) copy-start(%d)
  %e = f32[64,128]{1,0} copy-done(%t)
"""
    live = arrays(entry)
    assert (live["s"], live["t"]) == (1, 1)
