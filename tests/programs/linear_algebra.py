"""In: nothing. Out: losses and updates with decompositions, solves, inner solvers,
Fourier transforms and complex weights.
"""

import jax
import jax.numpy as jnp
import optax

from ._data import ROWS, vectors
from ._program import Program, register
from ._train import (
    dense_apply,
    dense_params,
    descend,
    normal_params,
    perceptron,
    squared_error,
    train,
)


@register("decompositions_per_row")
def decompositions_per_row() -> Program:
    """QR, SVD, Cholesky, eigenvalues and a solve of one matrix per row."""

    def loss_fn(params, batch):
        a = dense_apply(params, batch["x"]).reshape(ROWS, 3, 3)
        spd = a @ a.mT + jnp.eye(3)
        q, r = jnp.linalg.qr(a)
        singular = jnp.linalg.svd(a, compute_uv=False)
        values = jnp.linalg.eigvalsh(spd)
        solved = jnp.linalg.solve(spd, batch["x"][:, :3, None])
        whitened = jnp.linalg.cholesky(spd) @ batch["x"][:, :3, None]
        logdet = jnp.linalg.slogdet(spd)[1]
        inverse = jnp.linalg.inv(spd)
        parts = [q * r, singular, values, solved, whitened, logdet, inverse]
        return sum((jnp.tanh(part) ** 2).mean() for part in parts), {"values": values}

    def init(key):
        return dense_params(key, 7, 36, 9)

    return descend("decompositions_per_row", init, loss_fn, vectors)


@register("decompositions_of_the_batch")
def decompositions_of_the_batch() -> Program:
    """A ridge regression on features, solved inside the loss through Cholesky, and the
    spectrum of their covariance."""

    def loss_fn(params, batch):
        h = dense_apply(params, batch["x"])
        gram = h.T @ h / ROWS + 0.1 * jnp.eye(5)
        factor = jax.scipy.linalg.cho_factor(gram)
        w = jax.scipy.linalg.cho_solve(factor, h.T @ batch["y"] / ROWS)
        spectrum = jnp.linalg.eigvalsh(gram)
        loss = ((h @ w - batch["y"]) ** 2).mean() + 0.01 * (spectrum**2).sum()
        return loss, {"spectrum": spectrum}

    name = "decompositions_of_the_batch"
    return descend(name, perceptron, loss_fn, vectors)


@register("inner_solver")
def inner_solver() -> Program:
    """Conjugate gradients, a while loop, inside the loss; its gradient is another
    solve, not the loop's."""

    def loss_fn(params, batch):
        h = dense_apply(params, batch["x"])

        def matvec(v):
            return h.T @ (h @ v) / ROWS + 0.1 * v

        w, _ = jax.scipy.sparse.linalg.cg(matvec, h.T @ batch["y"] / ROWS, maxiter=20)
        return ((h @ w - batch["y"]) ** 2).mean(), {}

    # Conjugate gradients stop at a residual of 1e-5.
    return descend("inner_solver", perceptron, loss_fn, vectors, tol=1e-4)


@register("fixed_point")
def fixed_point() -> Program:
    """An equilibrium by a while loop to a tolerance, differentiated by the implicit
    function theorem in a custom_vjp."""

    def layer(params, x, z):
        return jnp.tanh(x @ params["in"] + 0.3 * z @ params["loop"])

    def solve(fn, z):
        def apart(carry):
            z, before, n = carry
            return (jnp.abs(z - before).max() > 1e-5) & (n < 30)

        start = fn(z), z, 0
        return jax.lax.while_loop(apart, lambda c: (fn(c[0]), c[0], c[2] + 1), start)[0]

    @jax.custom_vjp
    def equilibrium(params, x):
        start = jnp.zeros((x.shape[0], 19))
        return solve(lambda z: layer(params, x, z), start)

    def forward(params, x):
        z = equilibrium(params, x)
        return z, (params, x, z)

    def backward(kept, cotangent):
        params, x, z = kept
        _, pull_z = jax.vjp(lambda z: layer(params, x, z), z)
        u = solve(lambda u: cotangent + pull_z(u)[0], cotangent)
        _, pull = jax.vjp(lambda params, x: layer(params, x, z), params, x)
        return pull(u)

    equilibrium.defvjp(forward, backward)

    def loss_fn(params, batch):
        z = equilibrium(params, batch["x"])
        return ((z @ params["out"] - batch["y"]) ** 2).mean(), {}

    def init(key):
        shapes = {"in": (7, 19), "loop": (19, 19), "out": (19, 5)}
        return normal_params(key, **shapes)

    return descend("fixed_point", init, loss_fn, vectors)


@register("fourier")
def fourier() -> Program:
    """A spectral layer: a real transform along the features, complex weights stored in
    the state, and back; a complex transform of a weight."""

    def init(key):
        params = normal_params(key, real=(19, 36), imag=(19, 36), out=(36, 5))
        mix = params["real"] + 1j * params["imag"]
        return {"mix": mix, "out": params["out"], "filter": jnp.ones((7, 36))}

    def loss_fn(params, batch):
        x = jnp.fft.irfft(jnp.fft.fft(params["filter"])[:, :19], 36).T @ batch["x"].T
        spectrum = jnp.fft.rfft(x.T) @ params["mix"]
        h = jnp.tanh(jnp.fft.ifft(spectrum).real + jnp.abs(spectrum))
        loss = ((h @ params["out"] - batch["y"]) ** 2).mean()
        return loss, {"power": jnp.abs(spectrum).mean()}

    return descend("fourier", init, loss_fn, vectors, rate=0.01)


@register("newton_schulz")
def newton_schulz() -> Program:
    """A Muon by hand: orthogonalises stored momenta by products of Gram matrices."""

    def orthogonal(g):
        x = g / (jnp.linalg.norm(g) + 1e-3)
        for _ in range(3):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    def init(key):
        params = dense_params(key, 7, 40, 43, 5)
        return {"params": params, "momenta": jax.tree.map(jnp.zeros_like, params)}

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(squared_error)(state["params"], batch)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], grads)
        params = jax.tree.map(
            lambda p, m: p - 0.05 * (orthogonal(m) if m.ndim == 2 else m),
            state["params"],
            momenta,
        )
        return {"params": params, "momenta": momenta}, {"loss": loss}

    return Program("newton_schulz", init, train_step, vectors)


@register("shampoo")
def shampoo() -> Program:
    """A preconditioner on each side of every matrix, an inverse fourth root by
    eigenvalues; rebuilt every second step under a cond."""

    def root(statistic):
        values, vectors = jnp.linalg.eigh(statistic)
        return (vectors * jnp.maximum(values, 1e-3) ** -0.25) @ vectors.T

    def init(key):
        params = [p["w"] for p in dense_params(key, 7, 20, 5)]
        sides = [(jnp.eye(m), jnp.eye(n)) for m, n in (p.shape for p in params)]
        roots = jax.tree.map(jnp.copy, sides)
        step = jnp.int32(0)
        return {"params": params, "sides": sides, "roots": roots, "step": step}

    def train_step(state, batch):
        def loss_fn(params):
            h = jnp.tanh(batch["x"] @ params[0])
            return ((h @ params[1] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        sides = [
            (left + g @ g.T, right + g.T @ g)
            for (left, right), g in zip(state["sides"], grads, strict=True)
        ]
        roots = jax.lax.cond(
            state["step"] % 2 == 0,
            lambda: jax.tree.map(root, sides),
            lambda: state["roots"],
        )
        params = [
            p - 0.1 * left @ g @ right
            for p, g, (left, right) in zip(state["params"], grads, roots, strict=True)
        ]
        step = state["step"] + 1
        new = {"params": params, "sides": sides, "roots": roots, "step": step}
        return new, {"loss": loss}

    return Program("shampoo", init, train_step, vectors, tol=1e-4)


@register("sparse_operand")
def sparse_operand() -> Program:
    """A BCOO matrix of fixed places and trained values mixes features."""
    from jax.experimental import sparse

    rows, columns = jnp.meshgrid(jnp.arange(36), jnp.arange(4), indexing="ij")
    columns = (rows * 5 + columns * 7) % 19
    indices = jnp.stack((rows.ravel(), columns.ravel()), axis=1)

    def init_params(key):
        shapes = {"values": (144,), "in": (7, 36), "out": (19, 5)}
        return normal_params(key, **shapes)

    def loss_fn(params, batch):
        mix = sparse.BCOO((params["values"], indices), shape=(36, 19))
        h = jnp.tanh(batch["x"] @ params["in"]) @ mix
        return ((jnp.tanh(h) @ params["out"] - batch["y"]) ** 2).mean()

    tx = optax.adam(1e-2)
    return train("sparse_operand", init_params, loss_fn, tx, vectors)
