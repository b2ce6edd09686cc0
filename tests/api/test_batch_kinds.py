"""In: batches of ever new shapes. Out: what is kept for them is bounded, and goes
together; results are those of the plain step.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np

import shardfn
from shardfn._core.limits import BATCH_KINDS
from shardfn._core.recent import Recent


def caches_of(run: shardfn.ShardedStep) -> dict[str, Recent]:
    places = {"step": run, "programs": run.programs, "plain": run.plain}
    return {
        f"{place}.{name}": value
        for place, owner in places.items()
        for name in owner.__dataclass_fields__
        if isinstance(value := getattr(owner, name), Recent)
    }


def test_what_is_kept_for_shapes_of_batches_is_bounded() -> None:
    traces = []

    def step(w, x, key):
        traces.append(x.shape)
        return w * 0.5, (x * w).sum() + jax.random.normal(key)

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    run = shardfn.fully_shard(step, mesh, min_size=0, donate=False, state_argnums=0)
    caches = caches_of(run)
    assert len(caches) == 8
    assert {cache.limit for cache in caches.values()} == {BATCH_KINDS}
    for cache in caches.values():
        cache.limit = 3
    w, key = run.shard(jnp.arange(4.0)), jax.random.PRNGKey(0)
    shapes = [(2 * rows, 4) for rows in range(1, 7)]
    jitted = []
    for shape in shapes:
        x = np.ones(shape, np.float32)
        _, out = run(w, x, key)
        np.testing.assert_allclose(
            out, 6 * shape[0] + jax.random.normal(key), rtol=1e-6
        )
        (*_, last) = run.programs._jitted.values()
        assert last._cache_size() == 1, "one program for one kind of batch"
        jitted.append(weakref.ref(last.__wrapped__))
        del last
    assert {name: len(cache) for name, cache in caches.items()} == {
        "step._ready": 3,
        "step._divisions": 1,
        "step._in_place": 0,
        "step._checked": 3,
        "programs._jitted": 3,
        "plain.plans": 3,
        "plain.found": 3,
        "plain.keys": 3,
    }
    gc.collect()
    assert [ref() is not None for ref in jitted] == [False] * 3 + [True] * 3
    traces.clear()
    run(w, np.ones(shapes[-2], np.float32), key)
    assert traces == [], "the last used are there"
    run(w, np.ones(shapes[0], np.float32), key)
    assert traces, "others are compiled again"
