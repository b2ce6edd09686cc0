"""Each notation of HLO text that the reader knows, as the compilers write it."""

import pytest

from shardfn.analysis._hlo import overlapped_bytes, read_collectives, wire_bytes
from shardfn.analysis._hlo.parse import parse_module

ALL = "replica_groups={{0,1,2,3,4,5,6,7}}"
EIGHT = (tuple(range(8)),)

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def module(entry: str, *others: str) -> str:
    """A scheduled program for 8 devices with these instructions."""
    lines = [f"  {line.strip()}" for line in entry.strip().splitlines()]
    return "\n".join(
        ["HloModule jit_f, is_scheduled=true, num_partitions=8", *others]
        + ["ENTRY %main (p: f32[8]) -> f32[] {", *lines]
        + ["  ROOT %z = f32[] constant(0)", "}", ""]
    )


def test_what_constants_and_elements_are() -> None:
    """Read in one way for trip counts, scalars, live values and copies."""
    text = module(
        """%n = s32[] constant(-3)
        %t = pred[] constant(true)
        %f = pred[] constant(false)
        %x = f32[] constant(1.5)
        %a = s32[2]{0} constant({1, 2})
        %p = (f32[8]{0}, s32[]) parameter(0)
        %e = s32[] get-tuple-element(%p), index=1, metadata={op_name="at[0]"}"""
    )
    read = parse_module(text).entry.instructions
    constants = {name: instr.constant for name, instr in read.items()}
    assert [constants[name] for name in "ntfxape"] == [-3, True, False, *[None] * 4]
    assert {name: instr.element for name, instr in read.items() if name != "e"} == (
        dict.fromkeys("ntfxapz")
    )
    assert read["e"].element == 1


def summary(text: str) -> list[tuple[str, str, int, int]]:
    return [(c.op, c.dtype, c.elements, c.times) for c in read_collectives(text)]


@pytest.mark.parametrize(
    "line, expected",
    [
        (
            f"%g = bf16[64,8]{{1,0:T(8,128)(2,1)S(1)}} all-gather(%p), {ALL}",
            [("all_gather", "bfloat16", 512)],
        ),
        (
            f"g = f32[64]{{0}} all-gather(f32[8]{{0}} p), {ALL}, dimensions={{0}}",
            [("all_gather", "float32", 64)],
        ),
        (
            f"%g = (f32[8]{{0}}, f32[64]{{0}}) all-gather-start(f32[8]{{0}} %p), {ALL}",
            [("all_gather", "float32", 64)],
        ),
        (
            "%g = ((f32[8], s8[2]), (f32[64], s8[16])) all-gather-start(%p, %q), "
            f"channel_id=1, {ALL}, dimensions={{0}}",
            [("all_gather", "float32", 64), ("all_gather", "int8", 16)],
        ),
        (
            f"%r = f32[8]{{0}} reduce-scatter(%p), {ALL}, to_apply=%add",
            [("psum_scatter", "float32", 64)],
        ),
        (
            "%r = ((f32[64], bf16[16]), (f32[8], /*index=1*/bf16[2])) "
            f"reduce-scatter-start(%p, /*index=1*/%q), {ALL}, to_apply=%add",
            [("psum_scatter", "float32", 64), ("psum_scatter", "bfloat16", 16)],
        ),
        (
            f"%r = (f32[4], pred[]) all-reduce-start(%p, %q), {ALL}, to_apply=%add",
            [("all_reduce", "float32", 4), ("all_reduce", "bool", 1)],
        ),
        (
            "%c = (f32[4]{0}, f32[4]{0}, u32[]{:S(2)}, u32[]{:S(2)}) "
            "collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
            [("ppermute", "float32", 4)],
        ),
        (
            f"%t = (f32[4], f32[4]) all-to-all(%p, %q), {ALL}",
            [("all_to_all", "float32", 8)],
        ),
        (
            f"%t = (f32[4], f32[4]) all-to-all(%p, %q), {ALL}, dimensions={{0}}",
            [("all_to_all", "float32", 4), ("all_to_all", "float32", 4)],
        ),
        (
            f"%g = f8e4m3fn[64] all-gather(%p), {ALL}",
            [("all_gather", "float8_e4m3fn", 64)],
        ),
        (f"%d = f32[64]{{0}} all-gather-done(%g), {ALL}", []),
        (f'%c = f32[] copy(%p), metadata={{op_name="all-gather(x), {ALL}"}}', []),
    ],
)
def test_instructions(line, expected):
    found = read_collectives(module(line, ADD))
    assert [(c.op, c.dtype, c.elements) for c in found] == expected
    assert {c.combined for c in found} <= {len(expected)}


@pytest.mark.parametrize(
    "opcode, reduces",
    [
        *[("add", "sum"), ("maximum", "max"), ("minimum", "min")],
        *[("multiply", "prod"), ("and", "and"), ("or", "or")],
    ],
)
def test_reducers(opcode, reduces):
    text = module(f"%r = f32[4] all-reduce(%p), {ALL}, to_apply=%add", ADD)
    (found,) = read_collectives(text.replace(" add(", f" {opcode}("))
    assert (found.op, found.reduces) == ("all_reduce", reduces)


@pytest.mark.parametrize(
    "written, groups",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups={}", EIGHT),
        ("replica_groups=[1,8]<=[8]", EIGHT),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['r'=2,'d'=4] {'d'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['r'=2,'d'=4] {'r'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['r'=2,'d'=4] {'r','d'}", EIGHT),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", EIGHT),
        (
            "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}",
            ((0, 3), (1, 2)),
        ),
        ("replica_groups=mesh[d=8] {d:(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh[d=8] {d:(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_device_groups(written, groups):
    line = f"%g = f32[8] all-gather(%p), channel_id=1, {written}, dimensions={{0}}"
    (found,) = read_collectives(module(line))
    assert (found.groups, found.group_size) == (groups, len(groups[0]))


@pytest.mark.parametrize(
    "pairs, groups",
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", ((0, 1, 2, 3),)),
        ("{{2,3},{1,2},{0,1},{5,4}}", ((0, 1, 2, 3), (5, 4))),
        ("{{0,1},{1,0},{2,3},{3,2}}", ((0, 1), (2, 3))),
    ],
)
def test_permutations_are_grouped_by_cycle(pairs, groups):
    line = f"%c = f32[8] collective-permute(%p), source_target_pairs={pairs}"
    (found,) = read_collectives(module(line))
    assert (found.groups, found.wire_bytes) == (groups, 32)


@pytest.mark.parametrize(
    "op, full, sent",
    [
        (f"f32[8] all-gather(%p), {ALL}", 32, 28),
        (f"f32[8] all-reduce(%p), {ALL}, to_apply=%add", 32, 56),
        (f"f32[1] reduce-scatter(%p), {ALL}, to_apply=%add", 32, 28),
        (f"s4[16] all-to-all(%p), {ALL}, dimensions={{0}}", 8, 7),
        ("f32[8] all-gather(%p), replica_groups={{0},{1}}", 32, 0),
    ],
)
def test_bytes(op, full, sent):
    (found,) = read_collectives(module(f"%c = {op}", ADD))
    assert (found.bytes, found.wire_bytes) == (full, sent)


REGION = """
%{name} (p: f32[8]) -> f32[64] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %g.{name} = f32[64]{{0}} all-gather(%p), replica_groups={{{{0,1}}}}{rest}
}}
"""


def region(name: str, rest: str = "") -> str:
    return REGION.format(name=name, rest=rest)


@pytest.mark.parametrize(
    "caller, times",
    [
        ("call(%p), to_apply=%one", [1]),
        ("fusion(%p), kind=kLoop, calls=%one", [1]),
        ("((f32[8]), f32[64], u32[]) async-start(%p), calls=%one", [1]),
        ('custom-call(%p), custom_call_target="X", called_computations={%one}', [1]),
        ("conditional(%i, %p, %p), branch_computations={%one, %two}", [1, 1]),
        (
            "conditional(%i, %p, %p), true_computation=%one, false_computation=%two",
            [1, 1],
        ),
        (
            "while(%p), condition=%two, body=%one, "
            'backend_config={"known_trip_count":{"n":"7"},"x":"1"}',
            [8, 7],
        ),
        ("while(%p), condition=%two, body=%one", [1, 1]),
        ('call(%p), to_apply=%one, metadata={op_name="calls=%two"}', [1]),
        ("f32[64] async-done(%s), calls=%one", []),
    ],
)
def test_callers(caller, times):
    line = f"%c = {caller}" if " async" in caller else f"%c = f32[64] {caller}"
    found = read_collectives(module(line, region("one"), region("two")))
    assert [c.times for c in found] == times
    assert all(c.exact for c in found) == ("while" not in caller or 7 in times)


TPU_LOOP = """
%body (c: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %c = (s32[]{:T(128)}, f32[8]{0}, s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %i2 = s32[]{:T(128)S(6)} copy(%i)
  %one = s32[] constant(STEP)
  %next = s32[] add(%i2, %one)
  %x = f32[8]{0} get-tuple-element(%c), index=1
  %n = s32[] get-tuple-element(%c), index=2
  %g = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8], s32[]) tuple(%next, %g, %n)
}
%condition (c: (s32[], f32[8], s32[])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8]{0}, s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=2
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""


@pytest.mark.parametrize(
    "start, step, stop, times",
    [(0, 1, 6, 6), (1, 1, 6, 5), (0, 2, 5, 3), (6, 1, 6, 0)],
)
def test_a_tpu_loop_is_counted_from_its_counter(start, step, stop, times):
    entry = f"""
      %zero = s32[] constant({start})
      %copy = s32[]{{:T(128)}} copy(%zero)
      %stop = s32[] constant({stop})
      %p = f32[8] parameter(0)
      %init = (s32[], f32[8], s32[]) tuple(%copy, %p, %stop)
      %w = (s32[], f32[8], s32[]) while(%init), condition=%condition, body=%body
    """
    (found,) = read_collectives(module(entry, ADD, TPU_LOOP.replace("STEP", str(step))))
    assert (found.times, found.exact) == (times, True)


def test_a_loop_whose_bound_changes_has_no_count():
    entry = """
      %zero = s32[] constant(0)
      %p = f32[8] parameter(0)
      %init = (s32[], f32[8], s32[]) tuple(%zero, %p, %zero)
      %w = (s32[], f32[8], s32[]) while(%init), condition=%condition, body=%body
    """
    moving = TPU_LOOP.replace("STEP", "1").replace("%g, %n)", "%g, %next)")
    (found,) = read_collectives(module(entry, ADD, moving))
    assert (found.times, found.exact) == (1, False)


def test_an_all_reduce_sliced_in_its_fusion_is_a_reduce_scatter():
    scatter = f"""
%all-reduce-scatter.1 (p: f32[64,2]) -> f32[8,2] {{
  %p = f32[64,2]{{1,0}} parameter(0)
  %r = f32[64,2]{{1,0}} all-reduce(%p), {ALL}, to_apply=%add
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %s = f32[8,2]{{1,0}} dynamic-slice(%r, %id, %zero), dynamic_slice_sizes={{8,2}}
}}
"""
    line = "%f = f32[8,2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    assert summary(module(line, ADD, scatter)) == [("psum_scatter", "float32", 128, 1)]
    apart = f"""
      %r = f32[64,2]{{1,0}} all-reduce(%p), {ALL}, to_apply=%add
      %s = f32[8,2]{{1,0}} dynamic-slice(%r, %i, %j), dynamic_slice_sizes={{8,2}}
    """
    assert summary(module(apart, ADD)) == [("all_reduce", "float32", 128, 1)]


CHAIN = """
%start.{n} (p: f32[8]) -> f32[64] {{
  %p = f32[8] parameter(0)
  %g = f32[64] all-gather(%p), {ALL}, frontend_attributes={{chain_id="{n}"}}
  ROOT %c = (f32[8], f32[64]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
%step.{n} (p: f32[8], q: f32[8,8]) -> f32[8,8] {{
  %p = f32[8] parameter(0)
  %q = f32[8,8] parameter(1)
  %g = f32[64] all-gather(%p), {ALL}, frontend_attributes={{chain_id="{n}"}}
  ROOT %d = f32[8,8] convolution(%q, %q), dim_labels=bf_io->bf
}}
%done.{n} (p: f32[8]) -> f32[64] {{
  %p = f32[8] parameter(0)
  %g = f32[64] all-gather(%p), {ALL}, frontend_attributes={{chain_id="{n}"}}
  ROOT %c = f32[64] custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_gather_spread_over_tpu_fusions_counts_once():
    entry = """
      %s0 = (f32[8], f32[64]) fusion(%p), kind=kCustom, calls=%start.0
      %d0 = f32[64] fusion(%s0), kind=kCustom, calls=%done.0
      %s1 = (f32[8], f32[64]) fusion(%p), kind=kCustom, calls=%start.1
      %m1 = f32[8,8] fusion(%s1, %q), kind=kOutput, calls=%step.1
      %d1 = f32[64] fusion(%m1), kind=kCustom, calls=%done.1
    """
    chains = [CHAIN.format(n=n, ALL=ALL) for n in range(2)]
    found = read_collectives(module(entry, *chains))
    assert [(c.elements, c.overlapped) for c in found] == [(64, False), (64, True)]


def test_narrow_types_that_the_tpu_packs_into_words_are_counted_one_by_one():
    packed = """
%packed (a: u32[], b: u32[]) -> u32[] {
  %a = u32[] parameter(0)
  %b = u32[] parameter(1)
  %x = f16[] bitcast-convert(%a)
  %y = f16[] bitcast-convert(%b)
  %sum = f16[] add(%x, %y)
  %high = u32[] shift-left(%sum, %a)
  ROOT %word = u32[] or(%high, %b)
}
"""
    line = f"%r = u32[2,8]{{1,0}} all-reduce(%p), {ALL}, to_apply=%packed"
    assert summary(module(line, packed)) == [("all_reduce", "float16", 32, 1)]


GEMM = """
%gemm (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}
%sine (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %sin = f32[8,8]{1,0} sine(%p)
}
"""


@pytest.mark.parametrize(
    "between, overlapped",
    [
        ("%d = f32[8,8] dot(%p, %p)", True),
        ("%d = f32[8,8] convolution(%p, %p)", True),
        ("%d = f32[8,8] fusion(%p), kind=kCustom, calls=%gemm", True),
        (
            '%d = f32[8,8] custom-call(%p), custom_call_target="__cublas$lt$matmul"',
            True,
        ),
        ("%d = f32[8,8] fusion(%p), kind=kLoop, calls=%sine", False),
        ('%d = f32[8,8] custom-call(%p), custom_call_target="Sharding"', False),
        ("", False),
    ],
)
def test_overlap_is_a_matmul_between_start_and_done(between, overlapped):
    entry = f"""
      %before = f32[8,8] dot(%p, %p)
      %s = (f32[8], f32[64]) all-gather-start(%p), {ALL}
      {between}
      %e = f32[64] all-gather-done(%s)
      %after = f32[8,8] dot(%p, %p)
      %sync = f32[8] all-gather(%p), {ALL}
    """
    found = read_collectives(module(entry, GEMM))
    assert wire_bytes(found) == 224 + 28
    assert overlapped_bytes(found) == (224 if overlapped else 0)


def test_overlap_of_async_wrappers_lasts_through_updates():
    entry = """
      %s = ((f32[8]), f32[64], u32[]) async-start(%p), calls=%one
      %u = ((f32[8]), f32[64], u32[]) async-update(%s)
      %d = f32[8,8] dot(%p, %p)
      %e = f32[64] async-done(%u)
    """
    (found,) = read_collectives(module(entry, region("one")))
    assert found.overlapped


@pytest.mark.parametrize("overlapped", [True, False])
def test_what_the_sparse_cores_of_a_tpu_run(overlapped):
    beside = "%d = f32[8,8] dot(%p, %p)" if overlapped else ""
    entry = f"""
      %s = ((f32[64], token[]), f32[8]) call-start(%p, %t), to_apply=%sum
      {beside}
      %e = f32[8] call-done(%s)
    """
    inner = f"""
%sum (p: f32[64], t: token[]) -> f32[8] {{
  %p = f32[64] parameter(0)
  %t = token[] parameter(1)
  ROOT %r = f32[8] reduce-scatter(%p), {ALL}, to_apply=%add
}}, execution_thread="sparsecore"
"""
    (found,) = read_collectives(module(entry, ADD, inner))
    assert (found.op, found.elements) == ("psum_scatter", 64)
    assert found.overlapped == overlapped


def test_what_a_kernel_says_of_itself_takes_several_lines():
    """As splash attention's block sizes; what comes behind it is of the same body."""
    line = """%g = f32[8] all-gather(%p), ALL, frontend_attributes={said={
"sizes":"{\\"block_q\\": 128, \\"x = {\\": 1}"
}}, metadata={op_name="jit(f)/gather"}
      %h = f32[64] all-gather(%p), ALL, dimensions={0}, frontend_attributes={said={
"sizes":"{}"
}}"""
    text = module(line.replace("ALL", ALL))
    text = text.replace("  }}", "}}").replace('  "sizes', '"sizes')
    found = read_collectives(text)
    assert [(c.elements, c.op_name) for c in found] == [(8, "jit(f)/gather"), (64, "")]


def test_op_name_is_kept():
    line = f'%g = f32[8] all-gather(%p), {ALL}, metadata={{op_name="jit(f)/gather"}}'
    (found,) = read_collectives(module(line))
    assert found.op_name == "jit(f)/gather"


@pytest.mark.parametrize(
    "text, message",
    [
        ("HloModule m\n", "this is not the text of an HLO module: it has no ENTRY."),
        (
            module("%g = f32[8] all-gather(%p), replica_groups=@m<8>, dimensions={0}"),
            "cannot read the device groups of 'g': '@m<8>, dimensions={0}'.",
        ),
        (
            module("%g = f32[8] all-gather(%p), replica_groups=mesh['a'=8] 'a', x=1"),
            "cannot read the mesh of a collective: \"mesh['a'=8] 'a', x=1\".",
        ),
        (
            module(
                f"%r = f32[8] all-reduce(%p), {ALL}, to_apply=%add",
                ADD.replace(" add(", " atan2("),
            ),
            "cannot tell what 'r' reduces with: found [] in 'add'.",
        ),
        (
            module("%g = f32[8] all-gather(%p"),
            "unbalanced brackets in HLO text: '(%p'.",
        ),
    ],
)
def test_what_cannot_be_read_is_an_error(text, message):
    with pytest.raises(ValueError) as error:
        read_collectives(text)
    assert str(error.value) == message
