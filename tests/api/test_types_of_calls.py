"""In: one step, called with arguments of the same structure and other shapes, or over
another mesh. Out: what was found for one kind of call is not taken for another.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import shardfn
from shardfn._core.sharding import Axes
from shardfn.storage._leaves import leaves_of

X = np.arange(32, dtype=np.float32).reshape(16, 2)


def mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",))


def averaged(params, mean, x):
    """`mean` comes back as it was, where it has the shape of the parameters."""
    new = {"w": params["w"] - x.sum(0)[:, None]}
    moved = {"w": jnp.broadcast_to(mean["w"], new["w"].shape) * 0.5 + new["w"]}
    return new, moved, x.sum()


def test_shapes_decide_what_is_state_in_each_call() -> None:
    params = {"w": jnp.ones((2, 16))}
    step = shardfn.fully_shard(averaged, mesh(2), min_size=8, donate=False)
    for shape in ((2, 16), (2, 1), (2, 16), (2, 1)):
        mean = {"w": jnp.full(shape, 4.0)}
        expected, got = averaged(params, mean, X), step(params, mean, X)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
        found = step.meaning_of(params, mean, X).arguments
        assert found == ((0, 1) if shape == (2, 16) else (0,))


def test_a_trace_belongs_to_its_mesh() -> None:
    def counted(w, x):
        return w + jax.lax.psum(x.sum(), "data"), x * jax.lax.axis_size("data")

    step = shardfn.fully_shard(counted, mesh(2), min_size=8, donate=False)
    w = jnp.ones(16)
    plain, avals = step.plain, leaves_of((w, X), "argument")
    two, four = (plain.traced(*avals, Axes(("data",), (n,)), None) for n in (2, 4))
    assert two is not None and four is not None
    assert two[1] is not four[1]
    assert two[1] is not plain.traced(*avals, Axes(("data",), (2,)), None)
    assert str(two[1].jaxpr) != str(four[1].jaxpr)
