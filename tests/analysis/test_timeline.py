"""In: HLO texts and jaxprs written out by hand. Out: their FLOPs, bytes, live memory,
and when what runs on a machine with round rates.
"""

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from test_hlo_text import ADD, module

from shardfn.analysis import targets
from shardfn.analysis._flops import Flops, count_flops
from shardfn.analysis._hlo.cost import cost_of
from shardfn.analysis._hlo.live import live_bytes
from shardfn.analysis._hlo.parse import parse_module
from shardfn.analysis._hlo.play import play
from shardfn.analysis._hlo.timeline import Rates
from shardfn.analysis._latency import TransferTime, transfer

GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"


def flops_of(fn, *shapes) -> Flops:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_flops(jax.make_jaxpr(fn)(*avals).jaxpr)


def layer(h, w):
    return jnp.tanh(h @ w), None


@pytest.mark.parametrize(
    "fn, shapes, run",
    [
        (lambda x, w: x @ w, [(8, 4), (4, 6)], 2 * 8 * 4 * 6),
        (lambda x, w: x + w, [(8, 4), (8, 4)], 0),
        (
            lambda x, w: jnp.einsum("bij,bjk->bik", x, w),
            [(3, 8, 4), (3, 4, 6)],
            3 * 2 * 8 * 4 * 6,
        ),
        (lambda x, w: lax.scan(layer, x, w)[0], [(8, 4), (5, 4, 4)], 5 * 2 * 8 * 4 * 4),
        (
            lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w),
            [(4, 4), (4, 4)],
            2 * 2 * 4**3,
        ),
        (
            lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"),
            [(2, 3, 8, 8), (5, 3, 3, 3)],
            2 * (2 * 5 * 8 * 8) * (3 * 3 * 3),
        ),
    ],
)
def test_flops_of_a_jaxpr(fn, shapes, run) -> None:
    expected = Counter({"float32": run}) if run else Counter()
    assert flops_of(fn, *shapes) == Flops(expected, expected)


def test_rows_of_ragged_groups_count_as_those_of_one_matrix() -> None:
    """Forward and both gradients, of which one contracts the ragged rows; and groups
    that cut a batch."""

    def gradients(dot):
        return jax.grad(lambda x, w: (dot(x, w) ** 2).sum(), (0, 1))

    rows, width, hidden, groups = 24, 5, 7, 3
    sizes = jnp.array([4, 0, 20])

    def ragged(x, w):
        return lax.ragged_dot(x, w, sizes)

    both = [
        flops_of(gradients(dot), (rows, width), weights)
        for dot, weights in [
            (ragged, (groups, width, hidden)),
            (jnp.matmul, (width, hidden)),
        ]
    ]
    assert both[0] == both[1]
    assert both[0].run == {"float32": 3 * 2 * rows * width * hidden}
    batches = lax.RaggedDotDimensionNumbers(
        (((2,), (1,)), ((0,), (0,))),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )

    def cut_batch(x, w):
        return lax.ragged_dot_general(x, w, sizes, batches)

    found = flops_of(cut_batch, (rows, 2, width), (rows, width, hidden))
    assert found.run == {"float32": 2 * rows * 2 * width * hidden}


def test_rematerialized_flops_are_not_the_models() -> None:
    def loss(w, x):
        block = jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))
        return block(x).sum()

    found = flops_of(jax.grad(loss), (2, 16, 16), (8, 16))
    one = 2 * 8 * 16 * 16
    # Forward 2, again 2, backward 4 less the input's gradient, which nobody wants.
    assert found.model == {"float32": 5 * one}
    assert found.run == {"float32": 7 * one}


def test_a_while_loop_counts_once_and_says_so() -> None:
    def fn(x):
        return lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)

    found = flops_of(fn, (4, 4))
    assert found.run == {"float32": 2 * 4**3} and not found.exact


DOT = "%d = f32[64,32] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
A = "%a = bf16[64,128] parameter(0)"
B = "%b = bf16[128,32] parameter(1)"


@pytest.mark.parametrize(
    "lines, flops, size",
    [
        (
            [A, B, DOT],
            {"bfloat16": 2 * 64 * 128 * 32},
            64 * 128 * 2 + 128 * 64 + 64 * 128,
        ),
        (
            [
                A,
                B,
                '%g = (f32[64,32], s8[1024]) custom-call(%a, %b), custom_call_target="'
                '__cublas$gemm", backend_config={"dot_dimension_numbers":'
                '{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}',
            ],
            {"bfloat16": 2 * 64 * 128 * 32},
            4 * 64 * 128 + 1024,
        ),
        (  # A matmul with 8 x 8 batch dimensions, as the TPU writes it.
            [
                "%a = bf16[8,8,256,64]{3,2,1,0:T(8,128)} parameter(0)",
                "%b = bf16[8,8,64,256] parameter(1)",
                "%c = bf16[8,8,256,256] convolution(%a, %b), window={size=8x8 "
                "stride=7x7 lhs_dilate=8x8}, dim_labels=01bf_01io->01bf",
            ],
            {"bfloat16": 2 * 64 * 256 * 256 * 64},
            (8 * 8 * 256 * 64 * 2 + 8 * 8 * 256 * 256) * 2,
        ),
        (  # A convolution with padding: the border meets fewer elements.
            [
                "%a = f32[1,4,3] parameter(0)",
                "%b = f32[3,3,5] parameter(1)",
                "%c = f32[1,4,5] convolution(%a, %b), window={size=3 pad=1_1}, "
                "dim_labels=b0f_0io->b0f",
            ],
            {"float32": 2 * 5 * 3 * (3 * 4 - 2)},
            4 * (12 + 45 + 20),
        ),
        (  # On-chip memory is not device memory.
            [
                "%a = f32[64]{0:T(128)S(1)} parameter(0)",
                "%n = f32[64]{0} negate(%a)",
            ],
            {},
            256,
        ),
        (
            [
                "%a = f32[9,64] parameter(0)",
                "%i = s32[] parameter(1)",
                "%s = f32[1,64] dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}",
            ],
            {},
            2 * 256 + 8,
        ),
        (["%a = f32[8] parameter(0)", "%t = (f32[8]) tuple(%a)"], {}, 0),
    ],
)
def test_cost_of_an_instruction(lines, flops, size) -> None:
    parsed = parse_module(module("\n".join(lines)))
    last = list(parsed.entry.instructions.values())[-2]
    cost = cost_of(last, parsed.entry, parsed)
    assert (cost.flops, cost.bytes) == (flops, size)


UPDATED = """
%fused (p0: f32[9,64], p1: s32[], p2: f32[1,64]) -> f32[9,64] {
  %p0 = f32[9,64] parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,64] parameter(2)
  ROOT %u = f32[9,64] dynamic-update-slice(%p0, %p2, %p1, %p1)
}
"""
SLICED = """
%fused (p0: f32[9,64], p1: s32[], p2: f32[1,64]) -> f32[1,64] {
  %p0 = f32[9,64] parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,64] parameter(2)
  %s = f32[1,64] dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,64}
  ROOT %u = f32[1,64] add(%s, %p2)
}
"""
NESTED = """
%sliced (q0: f32[9,64], q1: s32[]) -> f32[1,64] {
  %q0 = f32[9,64] parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %s = f32[1,64] dynamic-slice(%q0, %q1, %q1), dynamic_slice_sizes={1,64}
}

%fused (p0: f32[9,64], p1: s32[], p2: f32[1,64]) -> f32[1,64] {
  %p0 = f32[9,64] parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,64] parameter(2)
  %v = f32[9,64] bitcast(%p0)
  %n = f32[1,64] fusion(%v, %p1), kind=kLoop, calls=%sliced
  ROOT %u = f32[1,64] add(%n, %p2)
}
"""


@pytest.mark.parametrize(
    "result, inner, size, live",
    [
        # The update is read and written in place; the array it goes into is left alone.
        ("f32[9,64]", UPDATED, 4 + 2 * 256, 0),
        ("f32[1,64]", SLICED, 4 + 3 * 256, 256),
        # TPUs have fusions in fusions: a layer's weights of a stack, and their product.
        ("f32[1,64]", NESTED, 4 + 3 * 256, 256),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_fusions_touch_only_what_they_slice(
    result, inner, size, live, is_async
) -> None:
    """Also where they run beside others, as XLA of JAX 0.12 lets a GPU's copies: their
    operands, whole stacks of layers, and their context are listed with the result."""
    shape, start = result, ""
    if is_async:
        shape, start = f"((f32[9,64], s32[], f32[1,64]), {result}, u32[])", "-start"
    entry = f"""
      %a = f32[9,64] parameter(0)
      %i = s32[] parameter(1)
      %b = f32[1,64] parameter(2)
      %f = {shape} fusion{start}(%a, %i, %b), kind=kLoop, calls=%fused
    """
    if is_async:
        entry += f"%d = {result} fusion-done(%f)\n"
    parsed = parse_module(module(entry, inner))
    assert cost_of(parsed.entry.instructions["f"], parsed.entry, parsed).bytes == size
    context = 4 if is_async and live else 0
    assert live_bytes(parsed.entry, parsed)["f"] == live + context
    if is_async:
        assert cost_of(parsed.entry.instructions["d"], parsed.entry, parsed).bytes == 0


ROUND = Rates(
    matmul=lambda _: 2.0 * 64 * 128 * 32,
    memory=math.inf,
    transfer=lambda _: TransferTime(3.0, 0.0),
)
"""The dot above takes a second, a transfer three, and memory is free."""

START = (
    f"%s = (f32[8], f32[64]) all-gather-start(%p), {GROUPS}, dimensions={{0}}",
    "%e = f32[64] all-gather-done(%s)",
)


def kinds(spans) -> list[tuple[str, float, float]]:
    return [(s.kind, s.start, pytest.approx(s.end)) for s in spans]


@pytest.mark.parametrize(
    "lines, device, exposed, alone",
    [
        ([START[0], DOT, START[1]], [("matmul", 0, 1), ("wait", 1, 3)], 2, False),
        ([*START, DOT], [("wait", 0, 3), ("matmul", 3, 4)], 3, False),
        (
            [f'{START[0]}, backend_config={{"is_sync":true}}', START[1], DOT],
            [("wait", 0, 3), ("matmul", 3, 4)],
            3,
            True,
        ),
        (
            [f"%g = f32[64] all-gather(%p), {GROUPS}, dimensions={{0}}", DOT],
            [("wait", 0, 3), ("matmul", 3, 4)],
            3,
            True,
        ),
    ],
)
def test_the_device_waits_where_the_schedule_does(
    lines, device, exposed, alone
) -> None:
    p = "%p = f32[8] parameter(2)"
    found = play(module("\n".join([A, B, p, *lines])), ROUND)
    shown = [s for s in found.device if s.end - s.start > 1e-9]
    assert kinds(shown) == device
    assert kinds(found.links) == [("all_gather", 0, 3)]
    assert found.exposed == pytest.approx(exposed)
    assert found.seconds == pytest.approx(device[-1][2])
    assert found.exposed_in_any_order == 0  # there is no loop
    assert found.links[0].bytes == 64 * 4 * 7 // 8
    assert found.alone == (found.links if alone else ())


LOOP = f"""{ADD}
%body (c: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {{
  %c = (s32[], f32[64,128]) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %x = f32[64,128] get-tuple-element(%c), index=1
  %r = f32[64,128] all-reduce(%x), {GROUPS}, to_apply=%add
  ROOT %t = (s32[], f32[64,128]) tuple(%n, %r)
}}
%test (d: (s32[], f32[64,128])) -> pred[] {{
  %d = (s32[], f32[64,128]) parameter(0)
  ROOT %always = pred[] constant(true)
}}
"""
ENTRY = """
  %n = s32[] parameter(0)
  %x = f32[64,128] parameter(1)
  %y = f32[64,128] negate(%x)
  %t = (s32[], f32[64,128]) tuple(%n, %y)
  %w = (s32[], f32[64,128]) while(%t), condition=%test, body=%body, TRIPS
  %v = f32[64,128] get-tuple-element(%w), index=1
  %m = f32[64,128] negate(%v)
"""


def test_loops_are_played_as_often_as_they_run() -> None:
    trips = 'backend_config={"known_trip_count":{"n":"4"}}'
    found = play(module(ENTRY.replace("TRIPS", trips), LOOP), ROUND)
    assert found.seconds == pytest.approx(4 * 3)
    assert found.rounds == tuple((3.0 * i, 3.0 * (i + 1), i) for i in range(4))
    many = trips.replace('"4"', '"1000"')
    found = play(module(ENTRY.replace("TRIPS", many), LOOP), ROUND)
    assert found.seconds == pytest.approx(3000)
    assert len(found.rounds) == 256


SUM = f"all-reduce(%x), {GROUPS}, to_apply=%add"
STARTED = f"all-reduce-start(%x), {GROUPS}, to_apply=%add"


@pytest.mark.parametrize(
    "lines, seconds, exposed, in_any_order",
    [
        # A transfer takes three seconds, a product one.
        ([f"%r = f32[64,128] {SUM}"], 3, 3, 3),
        ([f"%r = f32[64,128] {SUM}", 1], 4, 3, 2),
        ([f"%s = f32[64,128] {STARTED}", 1, "done"], 3, 2, 2),
        ([f"%s = f32[64,128] {STARTED}", 1, "done", 1], 4, 2, 1),
        ([f"%r = f32[64,128] {SUM}", 4], 7, 3, 0),
        ([f"%s = f32[64,128] {STARTED}", 4, "done"], 4, 0, 0),
    ],
)
def test_a_loop_that_sends_for_longer_than_it_computes_waits_in_any_order(
    lines, seconds, exposed, in_any_order
) -> None:
    done, body = "%r = f32[64,128] all-reduce-done(%s)", list[str]()
    for line in lines:
        if isinstance(line, int):
            at = len(body)
            body += [DOT.replace("%d =", f"%d{at}_{i} =") for i in range(line)]
        else:
            body.append(done if line == "done" else line)
    made = (line.replace("parameter(", "iota(), iota_dimension=") for line in (A, B))
    inner = LOOP.replace(f"  %r = f32[64,128] {SUM}", "\n".join([*made, *body]))
    trips = 'backend_config={"known_trip_count":{"n":"5"}}'
    found = play(module(ENTRY.replace("TRIPS", trips), inner), ROUND)
    assert found.seconds == pytest.approx(5 * seconds)
    assert found.exposed == pytest.approx(5 * exposed)
    assert found.exposed_in_any_order == pytest.approx(5 * in_any_order)


def test_the_quantizer_is_what_writes_and_reads_bits_outside_of_matmuls() -> None:
    inside = """
%writes (a: f32[64,128]) -> s8[64,128] {
  %a = f32[64,128] parameter(0)
  %h = f32[64,128] negate(%a), metadata={op_name="jit(f)/shardfn_quantize/neg"}
  ROOT %q = s8[64,128] convert(%h)
}
%matmul (b: s8[64,128], c: f32[64,128]) -> f32[64,64] {
  %b = s8[64,128] parameter(0)
  %c = f32[64,128] parameter(1)
  %w = f32[64,128] convert(%b), metadata={op_name="jit(f)/shardfn_dequantize/mul"}
  ROOT %d = f32[64,64] dot(%c, %w), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    text = module(
        """
  %x = f32[64,128] parameter(0)
  %q = s8[64,128] fusion(%x), kind=kLoop, calls=%writes
  %o = f32[64,64] fusion(%q, %x), kind=kCustom, calls=%matmul
  %n = f32[64,64] negate(%o), metadata={op_name="jit(f)/neg"}
""",
        inside,
    )
    found = play(text, ROUND)
    assert found.quantizer_bytes == 64 * 128 * (4 + 1)
    assert found.memory_bytes > 2 * found.quantizer_bytes


ONE_HOST = [(0, 0, g) for g in range(8)]
HOSTS = [(h, 0, g) for h in range(8) for g in range(8)]
V5P_PLANE = [(i, j, 0) for i in range(4) for j in range(4)]


@pytest.mark.parametrize(
    "name, coords, seconds",
    [
        ("h100:64", ONE_HOST, 1 / 450),
        # Eight network cards of 50 GB/s at each host's edge, or one.
        ("h100:64", HOSTS, 1 / 400),
        ("h100:64", [(h, 0, 0) for h in range(8)], 1 / 50),
        ("tpu:v5p:4x4x4", [(i, 0, 0) for i in range(4)], 3 / 600),
        ("tpu:v5p:4x4x4", V5P_PLANE, 1.5 / 600),
        ("tpu:v5e:2x4", [(i, j, 0) for i in range(2) for j in range(4)], 1 / 200),
    ],
)
def test_many_bytes_take_the_links_rate(name, coords, seconds) -> None:
    taken = transfer(targets.target(name), "all_gather", 1e9, coords)
    assert taken.links == pytest.approx(seconds)
    assert taken.latency < 0.2 * seconds


@pytest.mark.parametrize(
    "name, coords, over",
    [
        ("h100:64", ONE_HOST, ("NVLink",)),
        ("h100:64", HOSTS, ("NVLink", "network")),
        ("h100:64", [(h, 0, 0) for h in range(8)], ("network",)),
        ("h100:64", ONE_HOST[:1], ()),
        ("tpu:v5p:4x4x4", V5P_PLANE, ("links",)),
    ],
)
def test_which_links_a_transfer_occupies(name, coords, over) -> None:
    assert transfer(targets.target(name), "all_reduce", 1e9, coords).over == over


@pytest.mark.parametrize(
    "others, ends, exposed, in_any_order",
    [
        # Each takes two seconds on its links, the product one.
        (("network",), (2, 2), 1, 1),
        (("NVLink",), (2, 4), 3, 3),
        (("NVLink", "network"), (2, 4), 3, 3),
    ],
)
def test_what_occupies_other_links_moves_meanwhile(
    others, ends, exposed, in_any_order
) -> None:
    over = {"all_gather": ("NVLink",), "all_reduce": others}
    rates = dataclasses.replace(
        ROUND, transfer=lambda arrays: TransferTime(2.0, 0.0, over[arrays[0].op])
    )
    made = (line.replace("parameter(", "iota(), iota_dimension=") for line in (A, B))
    gathered = f"%s = (f32[64,128], f32[512,128]) all-gather-start(%x), {GROUPS}"
    body = [
        *made,
        f"{gathered}, dimensions={{0}}",
        f"%u = f32[64,128] {STARTED}",
        DOT,
        "%e = f32[512,128] all-gather-done(%s)",
        "%r = f32[64,128] all-reduce-done(%u)",
    ]
    inner = LOOP.replace(f"  %r = f32[64,128] {SUM}", "\n".join(body))
    trips = 'backend_config={"known_trip_count":{"n":"3"}}'
    found = play(module(ENTRY.replace("TRIPS", trips), inner), rates)
    assert [(s.end, s.over) for s in found.links[:2]] == [
        (ends[0], ("NVLink",)),
        (ends[1], others),
    ]
    assert found.exposed == pytest.approx(3 * exposed)
    assert found.exposed_in_any_order == pytest.approx(3 * in_any_order)


@pytest.mark.parametrize(
    "name, op, coords, microseconds",
    [
        # Seven steps of 0.6 us, or twice as many, behind a start of 6.6 us.
        ("h100:8", "all_gather", ONE_HOST, 10.8),
        ("h100:8", "psum_scatter", ONE_HOST, 10.8),
        ("h100:8", "all_reduce", ONE_HOST, 15),
        ("h100:8", "all_to_all", ONE_HOST, 7.2),
        ("h100:8", "ppermute", ONE_HOST, 7.2),
        # 56 steps within hosts, of the network card's 1 us, and seven of 2.7 us.
        ("h100:64", "all_gather", HOSTS, 81.5),
        # A tree: up and down 7 steps of 0.6 us and 3 of 5 us.
        ("h100:64", "all_reduce", HOSTS, 45.2),
        ("h100:64", "all_to_all", HOSTS, 9.3),
        # Rings of four that close: two hops. Rows of two and four that do not: 1 + 3.
        ("tpu:v5p:4x4x4", "all_gather", V5P_PLANE, 4),
        ("tpu:v5p:4x4x4", "all_reduce", V5P_PLANE, 8),
        ("tpu:v5e:2x4", "all_gather", [(i, j, 0) for i in (0, 1) for j in range(4)], 4),
        ("h100:8", "all_gather", ONE_HOST[:1], 0),
    ],
)
def test_few_bytes_take_the_latency(name, op, coords, microseconds) -> None:
    taken = transfer(targets.target(name), op, 1, coords)
    assert taken.seconds == pytest.approx(microseconds * 1e-6, rel=1e-3)


def test_between_few_bytes_and_many_the_fastest_protocol_counts() -> None:
    target, seconds = targets.target("h100:8"), []
    for sent in (2**10, 2**17, 2**20, 2**22, 2**24, 2**30):
        taken = transfer(target, "all_gather", sent, ONE_HOST)
        seconds.append(taken.seconds)
        assert taken.seconds >= sent / target.link_bandwidth
    assert seconds == sorted(seconds)


LATE = Rates(
    matmul=lambda _: 2.0 * 64 * 128 * 32,
    memory=math.inf,
    transfer=lambda arrays: TransferTime(1.0 * len(arrays), 2.0),
    gap=0.5,
)
"""The dot takes a second and a half, an array one on the links, and is there two
seconds after the last of its collective."""


def test_latency_delays_a_result_and_leaves_the_links_free() -> None:
    entry = f"""
      %p = f32[8] parameter(2)
      %s = (f32[8], f32[64]) all-gather-start(%p), {GROUPS}, dimensions={{0}}
      %t = (f32[8], f32[64]) all-gather-start(%p), {GROUPS}, dimensions={{0}}
      {DOT}
      %x = f32[64] all-gather-done(%s)
      %y = f32[64] all-gather-done(%t)
    """
    found = play(module("\n".join([A, B, entry])), LATE)
    assert [(s.start, s.end) for s in found.links] == [(0, 1), (1, 2)]
    assert kinds(found.device) == [
        *[("matmul", 0, 1.5), ("wait", 1.5, 3), ("wait", 3, 4)]
    ]
    assert found.exposed_by_op == {"all_gather": pytest.approx(2.5)}
    assert (found.kernels, found.latency, found.transfers) == (1, 4, 6)


def test_float32_matmuls_are_half_as_fast_on_gpus() -> None:
    h100, v5e = targets.target("h100:8"), targets.target("tpu:v5e:2x4")
    assert h100.matmul_rate("float32") == h100.matmul_rate("bfloat16") / 2
    assert v5e.matmul_rate("float32") == v5e.matmul_rate("bfloat16")
