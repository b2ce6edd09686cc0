"""Hypothesis strategies for programs."""

import os
from collections.abc import Sequence
from typing import Any

from builder import LARGEST, Builder, Value, operations
from hypothesis import strategies as st
from language import NARROW, Block, Program, Type
from operations import TABLE, THEMES
from oracle import jumps
from steps import FORMS
from surroundings import MESHES

SIZES = (3, 5, 7, 8, 12, 36, 101)

ROWS = (8, 16, 24, 4, 12, 30, 96, 96, 240, 320)
"""With many, gradients are added up over devices; with few, rows may be gathered."""

LAST = ("dense", "with_other_rows")
"""Operations that a program ends with, so that its loss depends on them."""

BETWEEN = ("map", "average", "jit", "get", "pickle", "put", "replicate", "mesh")

ALIASES = ("leaves", "buffers", "batch")
"""The last asks for a `batch_spec`, whose containers are those of all arguments that
are not state: not said beforehand of a step whose last argument may be state or not."""

SETTINGS = ("ranks", "leaks", "nans", "x64")

GRADS = ("two", "inner", "unrolled")

OPTIONS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, False),
    "prefetch": (1, 2, "first"),
    "bucket_bytes": (256, 2**20),
    "accumulate": ("scatter", "defer"),
    "reduce_dtype": ("float32", "bfloat16"),
    "gather_dtype": ("float32", "bfloat16"),
    "donate": (False,),
    "shard": (False, {"*0": False}),
    "stationary": (True, False, {"*0": True}),
}

FORCED = {"True": True, "False": False}.get(os.environ.get("SHARDFN_STATIONARY", ""))
"""What `stationary` every program asks for, if the environment says so."""


@st.composite
def programs(draw: st.DrawFn, calls: int = 8) -> Program:
    """Training steps of up to `calls` random operations, and what those hold."""
    mesh = draw(st.sampled_from(list(MESHES)))
    micro = draw(st.sampled_from([1, 1, 1, 2]))
    parts = MESHES[mesh].divides
    rows = draw(st.sampled_from([n for n in ROWS if n % parts == 0])) * micro
    sizes = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True))
    b = Builder(draw, TABLE, sizes, rows // micro)
    b.leaves = {"p": [], "c": [], "b": []}
    b.values.append(Value("key", Type((), "k"), True, 0))
    grow_leaves(b, draw, sizes)
    b.favoured = THEMES[draw(st.sampled_from(list(THEMES)))]
    b.smooth = b.integer(0, 3) == 0
    b.grow(operations(b), b.integer(3, calls))
    b.grow(LAST, b.integer(0, 2))
    if all(not v.name.startswith("v") for v in b.values):
        b.call("neg", [b.pick()])
    floats = [v for v in b.values if v.type.dtype == "f" and v.name[0] == "v"]
    losses = [v.name for v in floats[-3:]] or [b.pick().name]
    seen = [v for v in b.values if v.type.dtype != "k"]
    metrics = draw(st.lists(st.sampled_from(seen), max_size=3, unique=True))
    wide = tuple(
        Type((t.shape[0] * micro, *t.shape[1:]), t.dtype) for t in b.leaves["b"]
    )
    forward = Block(tuple(b.calls), tuple(v.name for v in metrics))
    is_exact = jumps(forward)
    form = draw(some_of(tuple(FORMS)[1:], "state"))
    return Program(
        params=tuple(b.leaves["p"]),
        counts=tuple(b.leaves["c"]),
        batch=wide,
        forward=forward,
        losses=tuple(losses),
        mean=draw(st.booleans()),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adam", "lamb"])),
        clip=draw(st.booleans()),
        wrap=draw(st.sampled_from(["", "jit", "remat"])),
        micro=micro,
        mesh=mesh,
        min_size=draw(st.sampled_from([0, 0, 8, 64, 2**14])),
        options=draw(options(is_exact)),
        grads=draw(some_of(GRADS[:2] if is_exact else GRADS, "one")),
        form=form,
        between=draw(some_of(BETWEEN)),
        alias=draw(some_of(ALIASES[: 2 if form == "loss first" else 3])),
        setting=draw(some_of(SETTINGS)),
    )


def grow_leaves(b: Builder, draw: st.DrawFn, sizes: Sequence[int]) -> None:
    """The leaves that every program has, and in half of them narrow integers."""
    x = Type((b.rows, *(b.size() for _ in range(b.integer(0, 2)))))
    x = x if x.size <= LARGEST else Type(x.shape[:2])
    x = x if x.size <= LARGEST else Type(x.shape[:1])
    b.leaf("b", x)
    indices = draw(st.sampled_from([(b.rows,), x.shape[:2], x.shape]))
    b.leaf("b", Type(indices, draw(st.sampled_from("iiii" + NARROW))))
    wide = Type((b.rows, b.size()))
    if wide.size <= LARGEST and b.boolean():
        b.leaf("b", wide)
    if b.integer(0, 3) == 0:
        b.leaf("b", Type((b.rows,), b.one_of(NARROW)))
    shape = draw(st.sampled_from([(), (sizes[0],)]))
    b.leaf("c", Type(shape, draw(st.sampled_from("iiii" + NARROW))))
    b.param(b.size())


def some_of(choices: tuple[str, ...], usual: str = "") -> st.SearchStrategy[str]:
    """The usual one in two of three programs."""
    return st.sampled_from([*max(2 * len(choices), 1) * [usual], *choices])


@st.composite
def options(draw: st.DrawFn, is_exact: bool) -> tuple[tuple[str, Any], ...]:
    """Up to two options, in a third of the programs one collective for several leaves,
    and in a third leaves that stay; no rounding on the wire where a program jumps."""
    names = draw(st.lists(st.sampled_from(list(OPTIONS)), max_size=2, unique=True))
    for often in ("bucket_bytes", "stationary"):
        if draw(st.integers(0, 2)) == 0 and often not in names:
            names.append(often)
    chosen = [(name, draw(st.sampled_from(OPTIONS[name]))) for name in names]
    if FORCED is not None:
        chosen = [c for c in chosen if c[0] != "stationary"]
        chosen.append(("stationary", FORCED))
    return tuple(c for c in chosen if not (is_exact and c[1] == "bfloat16"))
