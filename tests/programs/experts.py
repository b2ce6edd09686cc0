"""In: nothing. Out: mixtures of experts: dispatch by one-hot, by scatter into buffers
of a capacity, and by sorting into ragged groups.
"""

import jax
import jax.numpy as jnp
import optax

from ._data import tokens
from ._program import Program, register
from ._train import cross_entropy, normal_params, train

VOCAB, WIDTH, HIDDEN, EXPERTS = 101, 12, 21, 3


def _program(name, experts_fn, **kwargs) -> Program:
    """Trains a table, a router and experts: `experts_fn(params, tokens, gates)`."""

    def init_params(key):
        return normal_params(
            key,
            table=(VOCAB, WIDTH),
            router=(WIDTH, EXPERTS),
            up=(EXPERTS, WIDTH, HIDDEN),
            down=(EXPERTS, HIDDEN, WIDTH),
        )

    def loss_fn(params, batch):
        x = params["table"][batch["tokens"]]
        flat = x.reshape(-1, WIDTH)
        gates = jax.nn.softmax(flat @ params["router"])
        x = x + experts_fn(params, flat, gates).reshape(x.shape)
        share = jax.nn.one_hot(gates.argmax(-1), EXPERTS).mean(0)
        balance = EXPERTS * (share * gates.mean(0)).sum()
        logits = x @ params["table"].T
        return cross_entropy(logits, batch["labels"]) + 0.01 * balance

    tx = optax.adam(1e-2)
    return train(name, init_params, loss_fn, tx, tokens, **kwargs)


@register("experts_one_hot")
def experts_one_hot() -> Program:
    """The two best experts of each token, chosen and mixed by products."""

    def experts_fn(params, x, gates):
        best, chosen = jax.lax.top_k(gates, 2)
        mix = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(1)
        h = jax.nn.gelu(jnp.einsum("td,edf->tef", x, params["up"]))
        return jnp.einsum("tef,efd,te->td", h, params["down"], mix)

    return _program("experts_one_hot", experts_fn)


@register("experts_capacity")
def experts_capacity() -> Program:
    """Each expert takes its first tokens of the whole batch: the place of a token is a
    cumulative sum over all of them."""
    capacity = 41

    def experts_fn(params, x, gates):
        gate, expert = gates.max(-1), gates.argmax(-1)
        counts = jnp.cumsum(jax.nn.one_hot(expert, EXPERTS, dtype=jnp.int32), axis=0)
        place = jnp.take_along_axis(counts, expert[:, None], axis=1)[:, 0] - 1
        inside = place < capacity
        slots = jnp.zeros((EXPERTS, capacity, WIDTH))
        slots = slots.at[expert, place].add(x * inside[:, None], mode="drop")
        h = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", slots, params["up"]))
        out = jnp.einsum("ecf,efd->ecd", h, params["down"])
        taken = out.at[expert, place].get(mode="fill", fill_value=0.0)
        return taken * (gate * inside)[:, None]

    return _program("experts_capacity", experts_fn)


@register("experts_ragged")
def experts_ragged() -> Program:
    """Tokens sorted by expert, multiplied in ragged groups, and sorted back."""

    def experts_fn(params, x, gates):
        gate, expert = gates.max(-1), gates.argmax(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=EXPERTS)
        h = jax.nn.gelu(jax.lax.ragged_dot(x[order], params["up"], sizes))
        out = jax.lax.ragged_dot(h, params["down"], sizes)
        return jnp.zeros_like(x).at[order].set(out) * gate[:, None]

    return _program("experts_ragged", experts_fn, gathers=True)
