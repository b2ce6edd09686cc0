"""In: steps with a `jax.shard_map` of their own over the axis that they are sharded
over. Out: the numbers of the plain step on the same mesh, and no collectives but those
that the part itself asks for.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from plan_helpers import cpu_mesh

import shardfn

ROWS, COLUMNS = 16, 6
RNG = np.random.default_rng(0)
PARAMS = {
    "in": RNG.normal(size=(COLUMNS, 12)).astype(np.float32) / 2,
    "out": RNG.normal(size=(12, COLUMNS)).astype(np.float32) / 2,
}
BATCH = {
    "x": RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32),
}
KEY = jax.random.key(1)
Step = Callable[..., Any]


def mesh_of(sizes: tuple[int, ...], kind: AxisType = AxisType.Explicit) -> Mesh:
    names = ("replica", "data")[-len(sizes) :]
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=devices)


def rows(mesh: Mesh) -> P:
    names = mesh.axis_names
    return P(names if len(names) > 1 else names[0])


def trained(params: Any, x: jax.Array, y: jax.Array, extra: Any = None) -> Any:
    """One step of a two-layer network; `extra` adds a term to the loss."""

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ params["in"]) @ params["out"]
        more = 0.0 if extra is None else extra(h, y)
        return jnp.mean((h - y) ** 2) + more, h

    (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def mixup(mesh: Mesh) -> Step:
    """As big_vision has it, and with another weight on every device."""
    names = mesh.axis_names

    def mixed(key: jax.Array, *things: jax.Array) -> tuple[jax.Array, ...]:
        key = jax.random.fold_in(key, lax.axis_index(names))
        a = jax.random.uniform(key)
        a = jnp.maximum(a, 1 - a)
        return tuple(a * t + (1 - a) * jnp.roll(t, 1, axis=0) for t in things)

    def step(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        specs = (P(), rows(mesh), rows(mesh))
        run = jax.shard_map(mixed, mesh=mesh, in_specs=specs, out_specs=rows(mesh))
        x, y = run(key, batch["x"], batch["y"])
        params, loss = trained(params, x, y)
        return params, {"loss": loss, "x": x}

    return step


def captured_key(mesh: Mesh) -> Step:
    """big_vision's own: the weight is drawn by all devices alike, from a key that the
    part captures, and comes back from it; the mesh is the one that is set."""

    def step(params: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        key, mine = jax.random.split(key)

        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(P(), rows(mesh), rows(mesh)),
            out_specs=(P(), rows(mesh), rows(mesh)),
        )
        def mixed(key: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
            a = jax.random.beta(key, 2.0, 2.0)
            return (
                a,
                a * x + (1 - a) * jnp.roll(x, 1, axis=0),
                a * y + (1 - a) * jnp.roll(y, 1, axis=0),
            )

        a, x, y = mixed(mine, batch["x"], batch["y"])
        params, loss = trained(params, x, y)
        return params, {"loss": loss, "a": a, "x": x}

    return step


def mean(mesh: Mesh) -> Step:
    """Normalized by statistics of all devices and of the device's own rows, under
    `grad`, with scalars in and out."""
    names = mesh.axis_names

    def normalized(h: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        whole = lax.pmean(jnp.mean(h, 0), names)
        top = lax.pmax(lax.stop_gradient(jnp.max(h)), names)
        return scale * jax.nn.relu(h - whole) * jnp.mean(h, 0), whole, top

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        def extra(h: jax.Array, y: jax.Array) -> jax.Array:
            part = jax.shard_map(
                jax.jit(normalized),
                mesh=mesh,
                in_specs=(rows(mesh), P()),
                out_specs=(rows(mesh), P(), P()),
            )
            h, whole, top = part(h, jnp.float32(0.5))
            return jnp.mean(h**2) + jnp.sum(whole**2) + 0.1 * top

        params, loss = trained(params, batch["x"], batch["y"], extra)
        return params, {"loss": loss}

    return step


def contrastive(mesh: Mesh) -> Step:
    """Each device scores its rows against those of all, which it gathers, in a scan
    with recomputation."""
    names = mesh.axis_names

    def scores(h: jax.Array, y: jax.Array) -> jax.Array:
        others = lax.all_gather(y, names, axis=0, tiled=True)
        first = lax.axis_index(names) * h.shape[0]
        logits = h @ others.T
        at = first + jnp.arange(h.shape[0])
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), at[:, None], 1)

        @jax.checkpoint
        def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return total + lax.pmean(jnp.tanh(row).sum(), names), None

        total, _ = lax.scan(body, jnp.float32(0), h)
        return total - lax.psum(own.sum(), names)

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        specs = (rows(mesh), rows(mesh))
        part = jax.shard_map(scores, mesh=mesh, in_specs=specs, out_specs=P())
        params, loss = trained(params, batch["x"], batch["y"], part)
        return params, {"loss": loss}

    return step


def scanned(mesh: Mesh) -> Step:
    """The part is called in a scan, and puts devices along
    the second dimension of one result."""
    names = mesh.axis_names

    def rolled(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = jnp.sum(h, 0)[:, None]
        return jnp.roll(h, 1, 0), sums * lax.axis_index(names[-1]).astype(h.dtype)

    part = jax.shard_map(
        rolled,
        mesh=mesh,
        in_specs=rows(mesh),
        out_specs=(rows(mesh), P(None, *rows(mesh))),
    )

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        def body(h: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            new, sums = part(h)
            return new, jnp.sum(sums**2)

        def extra(h: jax.Array, y: jax.Array) -> jax.Array:
            h, sums = lax.scan(body, h, None, length=2)
            return jnp.mean(h * y) + 0.01 * jnp.sum(sums)

        params, loss = trained(params, batch["x"], batch["y"], extra)
        return params, {"loss": loss}

    return step


def assert_like_plain(
    make: Callable[[Mesh], Step], mesh: Mesh, is_set: bool, *rest: Any
) -> shardfn.Plan:
    """Two steps, each of them like the plain one on the same mesh."""
    step = make(mesh)
    run = shardfn.fully_shard(
        step, mesh, axis=mesh.axis_names, min_size=8, donate=False
    )

    def put(tree: Any, spec: P) -> Any:
        return jax.device_put(tree, NamedSharding(mesh, spec))

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        plain, stored = jax.jit(step), run.shard(PARAMS)
        params, on_mesh = put(PARAMS, P()), put(BATCH, rows(mesh))
        for _ in range(2):
            params, expected = plain(params, on_mesh, *[put(x, P()) for x in rest])
            stored, metrics = run(stored, BATCH, *rest)
            for got, want in zip(
                jax.tree.leaves((run.unshard(stored), metrics)),
                jax.tree.leaves((params, expected)),
                strict=True,
            ):
                assert got.dtype == want.dtype and got.shape == want.shape
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        return run.plan(PARAMS, BATCH, *rest)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NETWORK = {
    ("all_gather", (6, 12)): 1,
    ("all_gather", (12, 6)): 1,
    ("all_reduce", ()): 1,
    ("psum_scatter", (6, 12)): 1,
    ("psum_scatter", (12, 6)): 1,
}
"""What training the network moves, over one mesh axis."""


@pytest.mark.parametrize(
    "make, sizes, kind, is_set, more",
    [
        (mixup, (4,), EXPLICIT, True, {}),
        (mixup, (4,), EXPLICIT, False, {}),
        (mixup, (1,), EXPLICIT, True, None),
        (mixup, (2, 2), AUTO, True, None),
        (captured_key, (4,), AUTO, False, {}),
        (mean, (4,), AUTO, False, {("all_reduce", (6,)): 2, ("all_reduce", ()): 1}),
        (mean, (2, 2), EXPLICIT, True, None),
        (contrastive, (2, 2), EXPLICIT, True, None),
        (scanned, (4,), AUTO, True, {}),
    ],
)
def test_like_the_plain_step(
    make: Any,
    sizes: tuple[int, ...],
    kind: AxisType,
    is_set: bool,
    more: dict[Any, int] | None,
) -> None:
    """`more` is what the part itself moves."""
    rest = (KEY,) if make in (mixup, captured_key) else ()
    plan = assert_like_plain(make, mesh_of(sizes, kind), is_set, *rest)
    assert not plan.fallbacks
    if more is not None:
        found = Counter((c.op, c.shape) for c in plan.collectives)
        assert found == Counter(NETWORK) + Counter(more)


def refused(part: Step, mesh: Mesh, spec: P, axis: Any, what: str, *rest: Any) -> None:
    def step(params: Any, batch: Any, *rest: Any) -> tuple[Any, Any]:
        specs = (spec, *[P()] * len(rest))
        mapped = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=spec)
        params, loss = trained(params, mapped(batch["x"], *rest), batch["y"])
        return params, loss

    run = shardfn.fully_shard(step, mesh, axis=axis, min_size=8)
    with pytest.raises(shardfn.ShardingError) as error:
        run.plan(PARAMS, BATCH, *rest)
    assert what in str(error.value)
    assert "test_inner_shard_map.py" in str(error.value)


def test_refused() -> None:
    mesh = mesh_of((2, 2), AUTO)
    both = ("replica", "data")

    def shifted(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, both, [(i, (i + 1) % 4) for i in range(4)])

    batched = "and JAX cannot batch one of its collectives over all devices: "
    refused(shifted, mesh, P(both), both, batched)

    def noisy(x: jax.Array, key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, lax.axis_index("data"))
        return x + jax.random.normal(key, x.shape)

    keys = "makes random numbers from several RBG keys"
    refused(noisy, mesh, P("data"), "data", keys, jax.random.key(0, impl="unsafe_rbg"))


def test_gathered_embeddings_send_what_a_global_step_sends() -> None:
    """A contrastive loss that gathers the other rows, written for one device."""
    mesh = cpu_mesh(8)

    def whole(h):
        return jax.nn.logsumexp(h @ h.T, 1).mean()

    def inner(h):
        def local(h):
            every = lax.all_gather(h, "data", axis=0, tiled=True)
            return lax.pmean(jax.nn.logsumexp(h @ every.T, 1).mean(), "data")

        return jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())(h)

    def sent(loss) -> int:
        def step(w, x):
            return w - jax.grad(lambda w: loss(jnp.tanh(x @ w)))(w), 0.0

        plan = shardfn.fully_shard(step, mesh, min_size=1).plan(
            jnp.ones((24, 24)), jnp.ones((16, 24))
        )
        return sum(c.total_bytes for c in plan.collectives)

    assert sent(inner) == sent(whole)


def test_a_pipeline_over_an_axis_that_is_left_to_xla() -> None:
    """Stages hand microbatches on, each sharded over the other mesh axis."""
    mesh, stages, microbatches = mesh_of((2, 2), AUTO), 2, 4
    hand_on = [(0, 1), (1, 0)]

    def pipeline(w: jax.Array, x: jax.Array) -> jax.Array:
        index = lax.axis_index("replica")

        def tick(out: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            arrived = lax.ppermute(out, "replica", hand_on)
            out = jnp.tanh(jnp.where(index == 0, x, arrived) @ w[0])
            return out, out

        idle = jnp.zeros((stages - 1, *x.shape[1:]))
        start = jnp.zeros(x.shape[1:])
        _, out = lax.scan(tick, start, jnp.concatenate([x, idle]))
        last = jnp.where(index == stages - 1, out[stages - 1 :], 0.0)
        return lax.psum(last, "replica")

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = jax.shard_map(
            pipeline,
            mesh=mesh,
            in_specs=(P("replica"), P()),
            out_specs=P(),
            axis_names={"replica"},
            check_vma=False,
        )

        def loss(w: jax.Array) -> jax.Array:
            rows = x.reshape(-1, microbatches, COLUMNS).swapaxes(0, 1)
            return jnp.square(run(w, rows)).mean()

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, value

    w = RNG.normal(size=(stages, COLUMNS, COLUMNS)).astype(np.float32)
    state = plain = jax.device_put(w, NamedSharding(mesh, P("replica")))
    run = shardfn.fully_shard(step, mesh, axis="data", min_size=0)
    assert {line.axis for line in run.plan(state, BATCH["x"]).collectives} == {"data"}
    state = run.shard(state)
    for _ in range(2):
        state, value = run(state, BATCH["x"])
        plain, expected = jax.jit(step)(plain, BATCH["x"])
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(state, plain, rtol=1e-5, atol=1e-6)
    assert "replica" in str(state.sharding.spec)
