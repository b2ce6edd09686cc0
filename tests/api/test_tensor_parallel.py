"""In: parameters that come in split over a mesh axis `model` that `fully_shard` was not
given. Out: they keep that split, get `data` on another dimension, matmuls run in parts,
and what moves over `data` is what the plan says, in parts of the bytes.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import aot
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plan_helpers import (
    CPU_MERGES_GATHERS,
    Moves,
    combined_sums,
    hlo_moves,
    planned_moves,
)
from programs import Program, gpt
from tiers import exhaustively

import shardfn
from shardfn.analysis import targets
from shardfn.analysis._hlo import HloCollective, read_collectives
from shardfn.storage._stored_array import stored_array
from shardfn.testing import assert_same

pytestmark = pytest.mark.standard_promotion

STEPS = 3
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "2x4": ((2, 4), ("data", "model")),
    "4x2": ((4, 2), ("data", "model")),
    "model first": ((2, 4), ("model", "data")),
    "2x2x2": ((2, 2, 2), ("replica", "data", "model")),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Parameters of one layer whose dimensions Megatron splits over `model`.
SPECS = {
    "query/kernel": P(None, "model"),
    "key/kernel": P(None, "model"),
    "value/kernel": P(None, "model"),
    "out/kernel": P("model"),
    "Dense_0/kernel": P(None, "model"),
    "Dense_0/bias": P("model"),
    "Dense_1/kernel": P("model"),
    "embed/embedding": P("model"),
    "head/kernel": P(None, "model"),
}
SIZES = dict(vocab=64, length=8, width=32, hidden=64, heads=4, layers=2)


def make_mesh(name: str, axis_type: AxisType) -> Mesh:
    sizes, names = MESHES[name]
    return jax.make_mesh(sizes, names, (axis_type,) * len(sizes))


def sharded(step, mesh: Mesh, **options: Any) -> shardfn.ShardedStep:
    axes = tuple(n for n in mesh.axis_names if n != "model")
    axis = axes if len(axes) > 1 else axes[0]
    return shardfn.fully_shard(step, mesh, axis=axis, **({"min_size": 8} | options))


@functools.cache
def program(scan: bool = False) -> Program:
    config = gpt.Config(scan=scan, remat=scan, **SIZES)
    return gpt.build("gpt", config)


@functools.cache
def plain(scan: bool = False) -> list[Any]:
    """The first state, then state and metrics of every plain step, on the host."""
    run = program(scan)
    state = jax.jit(run.init)(jax.random.key(0))
    out = [jax.device_get(state)]
    step = jax.jit(run.step)
    for seed in range(STEPS):
        state, metrics = step(state, run.batch(seed))
        out.append(jax.device_get((state, metrics)))
    return out


def spec_of(path: Sequence[Any], x: Any) -> P:
    """The split over `model` of a parameter, also one of a stack of layers."""
    name = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    for end, spec in SPECS.items():
        if name.endswith(end):
            return P(None, *spec) if "/layers/" in f"/{name}" else spec
    return P()


def shardings(tree: Any, mesh: Mesh) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, spec_of(path, x)), tree
    )


def split_parameters(state: Any, mesh: Mesh) -> Any:
    """The state with parameters alone split over `model`; moments stay on the host."""
    return state.replace(
        params=jax.device_put(state.params, shardings(state.params, mesh))
    )


def names_in(spec: P) -> set[str]:
    entries = (e if isinstance(e, tuple) else (e,) for e in spec)
    return {name for entry in entries for name in entry if name}


def assert_split(state: Any, mesh: Mesh) -> None:
    """`model` where it came in, also in moments, and `data` on another dimension."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        wanted, found = spec_of(path, x), x.sharding.spec
        assert isinstance(x.sharding, NamedSharding)
        if x.ndim < 2:
            assert names_in(found) in ({"data"}, {"model"}, set()), (path, found)
        else:
            assert "data" in names_in(found), (path, found)
        for dim, entry in enumerate(wanted):
            assert entry is None or found[dim] == entry, (path, wanted, found)
        assert ("model" in names_in(found)) == ("model" in names_in(wanted)), path


@pytest.mark.covering(1)
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("kind", ["2x4", "model first", exhaustively("2x2x2")])
def test_parity(kind: str, axis_type: AxisType) -> None:
    """Every leaf after every step; nothing is compiled or moved anew after the first.

    The layers are a scan with remat on one mesh and unrolled on the others.
    """
    scan = kind == "2x2x2"
    one, mesh = program(scan), make_mesh(kind, axis_type)
    first, *expected = plain(scan)
    run = sharded(one.step, mesh)
    state = run.shard(split_parameters(first, mesh))
    assert_split(state, mesh)
    for seed, (plain_state, plain_metrics) in enumerate(expected):
        state, metrics = run(state, one.batch(seed))
        assert_split(state, mesh)
        at = f"{kind}, step {seed + 1}"
        assert_same(plain_metrics, metrics, at, tol=1e-5)
        assert_same(plain_state, run.unshard(state), at, tol=1e-5, weak_types=False)
    (ready,), (jitted,) = run._ready.values(), run.programs._jitted.values()
    assert ready.arrays(jax.tree.leaves(state)), "the next call takes the short way"
    assert jitted._cache_size() == 1


# What moves


def abstract(scan: bool, mesh: Mesh) -> tuple[Any, Any]:
    """A state whose parameters come in split over `model`, and a batch."""
    one = program(scan)
    state = jax.eval_shape(one.init, jax.random.key(0))
    split = jax.tree.map(
        lambda x, named: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named),
        state.params,
        shardings(state.params, mesh),
    )
    return state.replace(params=split), one.batch(0)


def over_data(found: Sequence[HloCollective], mesh: Mesh) -> list[HloCollective]:
    """The collectives between devices that hold the same part of `model`."""
    at = np.arange(mesh.size).reshape(mesh.devices.shape)
    parts = np.moveaxis(at, mesh.axis_names.index("model"), 0)
    part = {device: i for i, devices in enumerate(parts) for device in devices.flat}
    kept = []
    for one in found:
        counts = {len({part[device] for device in group}) for group in one.groups}
        assert counts in ({1}, {len(parts)}), f"{one} is over parts of two axes"
        if counts == {1}:
            kept.append(one)
    return kept


def dots(text: str) -> set[tuple[int, ...]]:
    """Shapes of the matrix products of a compiled program, sizes of 1 left out."""
    found = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
    shapes = (map(int, shape.split(",")) for shape in found)
    return {tuple(n for n in shape if n > 1) for shape in shapes}


def without_gathers(moves: Moves) -> Moves:
    return Counter({key: n for key, n in moves.items() if key[0] != "all_gather"})


@pytest.mark.parametrize("scan", [exhaustively(False), True], ids=["unrolled", "scan"])
@pytest.mark.parametrize("name", ["cpu", aot("h100:8")])
def test_the_plan_is_compiled(name: str, scan: bool) -> None:
    """Over `data` each device sends what the plan says, of its part; matrix products
    are of parts too, and over `model` only activations are summed, as by Megatron."""
    mesh = make_mesh("4x2", AUTO)
    if name != "cpu":
        mesh = Mesh(targets.mesh(name).devices.reshape(4, 2), ("data", "model"))
    run = sharded(program(scan).step, mesh)
    args = abstract(scan, mesh)
    plan = run.plan(*args)
    text = run.lower(*args).compile().as_text()
    found = read_collectives(text)
    own = over_data(found, mesh)
    compiled, planned = hlo_moves(own), planned_moves(plan)
    if name == "cpu" and CPU_MERGES_GATHERS:
        compiled, planned = without_gathers(compiled), without_gathers(planned)
    else:
        assert sum(c.wire_bytes * c.times for c in own) == plan.wire_bytes
    assert combined_sums(compiled) == combined_sums(planned)
    checked = plan.verify(text)
    assert not checked.extra and len(checked.automatic) == len(found) - len(own)
    # Of a sum that GPUs make once in the loop and once in a longer array behind it, the
    # second half is taken for another line's: only the bytes above hold there.
    assert checked.ok or name != "cpu" or CPU_MERGES_GATHERS
    assert "left to XLA" in str(checked)
    rows, length, width = 16 // 4, SIZES["length"], SIZES["width"]
    beside = [c for c in found if c not in own]
    assert {c.op for c in beside} <= {"all_reduce"}, beside
    # Small sums may stand in the same array.
    assert 0 <= max(c.elements for c in beside) - rows * length * width <= 2 * width
    if name == "cpu":
        assert (rows * length, SIZES["hidden"] // 2) in dots(text)
        assert (rows, SIZES["heads"] // 2, length, length) in dots(text)
        assert not [s for s in dots(text) if SIZES["hidden"] in s]


def test_the_plan_counts_one_part() -> None:
    """Half of what the plan of a state that is not split over `model` counts."""
    mesh = make_mesh("4x2", AUTO)
    state, batch = abstract(True, mesh)
    run = sharded(program(True).step, mesh)
    whole = jax.eval_shape(program(True).init, jax.random.key(0))

    def sent(state) -> dict[tuple[str, str, str], int]:
        found: dict[tuple[str, str, str], int] = {}
        for c in run.plan(state, batch).collectives:
            key = c.op, c.phase, c.path
            found[key] = found.get(key, 0) + c.total_bytes
        return found

    split, plain = sent(state), sent(whole)
    for key, bytes_ in split.items():
        if key[2].endswith("kernel") or key[2].endswith("embedding"):
            assert 2 * bytes_ == plain[key], key
    of_whole = run.plan(whole, batch).parameter_bytes
    assert of_whole / 2 < run.plan(state, batch).parameter_bytes < of_whole * 0.52


def test_an_open_constraint_keeps_the_split() -> None:
    mesh, free = make_mesh("4x2", AUTO), P.UNCONSTRAINED

    def step(w, x):
        open_w = shardfn.constrain(w * 2, P(free, free))
        return w, (x @ open_w).sum()

    named = NamedSharding(mesh, P(None, "model"))
    w = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=named)
    plan = shardfn.fully_shard(step, mesh, min_size=8).plan(w, jnp.ones((8, 16)))
    gathered = [c.shape for c in plan.collectives if c.op == "all_gather"]
    assert gathered == [(16, 16)]


# States


X = np.random.default_rng(1).integers(-2, 3, (8, 12)).astype(np.float32)
XS = np.stack([X, X[::-1], X])
SMALL = {"in": P(None, "model"), "bias": P("model"), "odd": P(), "out": P("model")}
STORED = {
    "in": P("data", "model"),
    "bias": P("model"),
    "odd": P("data"),
    "out": P("model", "data"),
}
PADDED = (202, 4)
"""No dimension of the rest divides: 202 rows are stored as 204 over 4 devices."""


def create() -> Any:
    """One step on small integers is exact."""
    rng = np.random.default_rng(0)
    shapes = {"in": (12, 8), "bias": (8,), "odd": (9,), "out": (8, 4)}
    params = {k: jnp.asarray(rng.integers(-2, 3, s), "f4") for k, s in shapes.items()}
    return {"params": params, "opt": [jax.tree.map(lambda x: x * 0, params)]}


def small_step(state, x):
    def loss_fn(p):
        rows = (jax.nn.relu(x @ p["in"] + p["bias"] + 0.25) @ p["out"]) ** 2
        return rows.sum(-1).mean() + (p["odd"] ** 2).sum(), rows[:, 0]

    params, (mean,) = state["params"], state["opt"]
    (loss, rows), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    mean = jax.tree.map(lambda m, g: m / 2 + g / 64, mean, grads)
    params = jax.tree.map(lambda p, m: p - m, params, mean)
    return {"params": params, "opt": [mean]}, {"loss": loss, "rows": rows}


HOST = jax.device_get(create())


def split_small(mesh: Mesh, state: Any = HOST) -> Any:
    named = {k: NamedSharding(mesh, spec) for k, spec in SMALL.items()}
    return {**state, "params": jax.device_put(state["params"], named)}


def specs_of(state: Any) -> Any:
    return jax.tree.map(lambda x: stored_array(x).sharding.spec, state)


BOTH = {"params": STORED, "opt": [STORED]}
TRACED = jax.tree.map(lambda spec: P() if spec == P("data") else spec, BOTH)
"""The same of leaves in their own shapes, as a traced step takes and gives them."""
each_type = pytest.mark.parametrize(
    "axis_type", [AUTO, EXPLICIT], ids=["auto", "explicit"]
)


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def assert_step(run, out: Any, expected: Any = None) -> None:
    state, metrics = out
    got = run.unshard(state), metrics
    jax.tree.map(close, got, expected or jax.jit(small_step)(HOST, X))


@each_type
def test_every_way_to_name_the_split(axis_type: AxisType) -> None:
    mesh = make_mesh("2x4", axis_type)
    run = sharded(small_step, mesh, donate=False)
    state = run.shard(split_small(mesh))
    named = {k: NamedSharding(mesh, spec) for k, spec in SMALL.items()}
    shardings = {"params": named, "opt": [named]}

    def constrained() -> Any:
        state = create()
        params = lax.with_sharding_constraint(state["params"], named)
        return {**state, "params": jax.tree.map(lambda x: x * 1.0, params)}

    def explicit() -> Any:
        return {**create(), "params": jax.sharding.reshard(create()["params"], named)}

    made = {
        "out_shardings": jax.jit(create, out_shardings=shardings),
        "a constraint": jax.jit(constrained),
    }
    if axis_type == EXPLICIT:
        made = {"types": explicit}
    whole = split_small(mesh)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        jax.tree.map(jnp.asarray, whole),
    )
    found = {name: specs_of(run.init(fn)) for name, fn in made.items()}
    found["shardings of arrays"] = jax.tree.map(lambda x: x.spec, run.shardings(whole))
    found["of structs"] = jax.tree.map(lambda x: x.spec, run.shardings(abstract))
    found["stored"] = specs_of(state)
    found["stepped"] = specs_of(run(whole, X)[0])
    for way, specs in found.items():
        assert specs == (TRACED if "of" in way.split() else BOTH), way
    plans = [run.plan(s, X) for s in (whole, state, abstract)]
    assert plans[0] == plans[1] == plans[2]
    assert run.lower(abstract, X).as_text() == run.lower(state, X).as_text()
    assert_step(run, run(state, X))


@pytest.mark.covering(1)
@each_type
@pytest.mark.parametrize("kind", ["2x4", "2x2x2"])
def test_under_transforms(kind: str, axis_type: AxisType) -> None:
    """In a trace, types of a mesh without explicit axes name no split: that of the
    same state when it was last seen is taken."""
    mesh = make_mesh(kind, axis_type)
    run = sharded(small_step, mesh, donate=False)
    state = run.shard(split_small(mesh))
    out = jax.jit(run)(state, X)
    assert specs_of(out[0]) == TRACED
    assert_step(run, out)
    assert len(run.programs._jitted) == 1

    def many(step):
        return jax.jit(lambda state, xs: lax.scan(step, state, xs))

    out = many(run)(state, XS)
    assert specs_of(out[0]) == TRACED
    assert_step(run, out, many(small_step)(HOST, XS))
    grads = jax.grad(lambda s: run(s, X)[1]["loss"])(state)["params"]
    expected = jax.grad(lambda s: small_step(s, X)[1]["loss"])(HOST)["params"]
    assert grads["in"].sharding.spec == STORED["in"]
    got = run.unshard({"params": grads, "opt": [grads]})["params"]
    jax.tree.map(close, got, expected)


def test_vmap_over_seeds() -> None:
    mesh = make_mesh("2x4", AUTO)
    run = sharded(small_step, mesh, donate=False)
    run.shard(split_small(mesh))
    states = jax.tree.map(lambda x: np.stack([x, x + 1]), HOST)
    _, metrics = jax.vmap(run, (0, None))(states, X)
    _, expected = jax.jit(jax.vmap(small_step, (0, None)))(states, X)
    jax.tree.map(np.testing.assert_array_equal, metrics, expected)


@each_type
def test_a_padded_dimension_beside_a_split_one(axis_type: AxisType) -> None:
    """And a leaf with no other dimension, which stays whole over `data`."""

    def double(state, x):
        total = sum(w.sum() for w in jax.tree.leaves(state))
        return jax.tree.map(lambda w: w + w / w * w, state), total + x.sum()

    mesh = make_mesh("4x2", axis_type)
    host = {"padded": np.ones(PADDED, "f4"), "alone": np.ones((3, 16), "f4")}
    named = NamedSharding(mesh, P(None, "model"))
    run = sharded(double, mesh)
    state = run.shard(jax.device_put(host, named))
    assert state["padded"].array.shape == (204, 4)
    assert specs_of(state) == {"padded": P("data", "model"), "alone": P(None, "model")}
    for times in (2, 4):
        state, total = run(state, X[:, :1] * 0)
        assert total == times / 2 * (202 * 4 + 3 * 16)
        for name, x in run.unshard(state).items():
            np.testing.assert_array_equal(x, host[name] * times)
        assert not np.asarray(state["padded"].array)[202:].any()
        assert specs_of(state)["padded"] == P("data", "model")
    state = jax.tree.map(lambda x: x * 1.0, state)
    assert run.unshard(state)["padded"].shape == PADDED


def test_what_was_seen_before_does_not_decide() -> None:
    """A whole state on the host is stored without `model`, whatever came before it."""
    mesh = make_mesh("2x4", AUTO)
    run = sharded(small_step, mesh)
    before = run.shardings(HOST)
    run.shard(split_small(mesh))
    assert run.shardings(HOST) == before
    assert "model" not in str(jax.tree.map(lambda x: x.spec, before))
    state, _ = run(run.shard(HOST), X)
    assert jax.tree.map(lambda x: x.sharding, state) == before


def test_moments_made_in_a_jit() -> None:
    """Such moments come in whole on every device."""
    mesh = make_mesh("2x4", AUTO)
    split = split_small(mesh)
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))(split["params"])
    state = sharded(small_step, mesh).shard({**split, "opt": [zeros]})
    assert specs_of(state) == BOTH


def test_parameters_beside_split_ones_are_left_alone() -> None:
    mesh = make_mesh("2x4", AUTO)
    layer = {"kernel": np.ones((8, 16), "f4"), "scale": np.ones(16, "f4")}
    host = jax.device_put({"a": layer, "b": layer}, NamedSharding(mesh, P()))
    split = jax.device_put(host["a"]["kernel"], NamedSharding(mesh, P(None, "model")))
    params = {**host, "a": {**host["a"], "kernel": split}}
    run = sharded(lambda s, x: (s, x.sum()), mesh)
    state = run.shard({"params": params, "opt": [{"mu": host}]})
    specs = specs_of(state)
    assert specs["params"]["a"]["kernel"] == P("data", "model")
    assert specs["params"]["b"]["kernel"] == P(None, "data")
    assert specs["opt"][0]["mu"] == specs["params"]


@each_type
def test_a_batch_that_is_split_over_model_too(axis_type: AxisType) -> None:
    mesh = make_mesh("2x4", axis_type)
    run = sharded(small_step, mesh)
    batch = jax.device_put(X, NamedSharding(mesh, P("data", "model")))
    assert_step(run, run(run.shard(split_small(mesh)), batch))
