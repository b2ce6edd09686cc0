"""Hypothesis strategies for programs."""

from builder import LARGEST, Builder, Value, operations
from hypothesis import strategies as st
from language import Block, Program, Type
from operations import TABLE

SIZES = (3, 5, 7, 8, 12, 36, 101)
MESHES = ("2", "4", "8", "2x4")


@st.composite
def programs(draw: st.DrawFn, calls: int = 8) -> Program:
    """Training steps of up to `calls` random operations, and what those hold."""
    micro = draw(st.sampled_from([1, 1, 1, 2]))
    rows = draw(st.sampled_from([8, 16, 24])) * micro
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True))
    b = Builder(draw, TABLE, sizes, rows // micro)
    b.leaves = {"p": [], "c": [], "b": []}
    b.values.append(Value("key", Type((), "k"), True, 0))
    x = Type((b.rows, *(b.size() for _ in range(b.integer(0, 2)))))
    x = x if x.size <= LARGEST else Type(x.shape[:2])
    x = x if x.size <= LARGEST else Type(x.shape[:1])
    b.leaf("b", x)
    b.leaf("b", Type(draw(st.sampled_from([(b.rows,), x.shape[:2], x.shape])), "i"))
    if b.boolean():
        b.leaf("b", Type((b.rows, b.size())))
    b.leaf("c", Type(draw(st.sampled_from([(), (sizes[0],)])), "i"))
    b.param(b.size())
    b.grow(operations(b), b.integer(3, calls))
    if all(not v.name.startswith("v") for v in b.values):
        b.call("neg", [b.pick()])
    floats = [v for v in b.values if v.type.dtype == "f" and v.name[0] == "v"]
    losses = [v.name for v in floats[-3:]] or [b.pick().name]
    seen = [v for v in b.values if v.type.dtype != "k"]
    metrics = draw(st.lists(st.sampled_from(seen), max_size=3, unique=True))
    wide = tuple(
        Type((t.shape[0] * micro, *t.shape[1:]), t.dtype) for t in b.leaves["b"]
    )
    return Program(
        params=tuple(b.leaves["p"]),
        counts=tuple(b.leaves["c"]),
        batch=wide,
        forward=Block(tuple(b.calls), tuple(v.name for v in metrics)),
        losses=tuple(losses),
        mean=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam", "lamb"])),
        clip=draw(st.booleans()),
        wrap=draw(st.sampled_from(["", "jit", "remat"])),
        micro=micro,
        mesh=draw(st.sampled_from(MESHES)),
        min_size=draw(st.sampled_from([0, 8, 64, 2**14])),
    )
