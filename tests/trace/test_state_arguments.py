"""In: steps with any signature. Out: which of their arguments are state, and where each
comes back: by containers, names and types, and by what becomes of each leaf.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.tree_util import keystr

import shardfn
from shardfn._core.call_arguments import StateArguments

pytestmark = pytest.mark.standard_promotion

OPT = optax.adam(0.1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converted:
    w: Any

    def __post_init__(self) -> None:
        self.w = jnp.asarray(self.w)


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)


P = {"w": ones(16, 8), "b": ones(10)}
with jax.numpy_dtype_promotion("standard"):
    MU = OPT.init(P)
X = ones(8, 16)
AE = {"e": ones(16, 4), "d": ones(4, 16)}
TOKENS = jnp.arange(8)
CACHE = {"k": jnp.zeros((8, 5, 8)), "n": jnp.int32(0)}
EMBED = {"embed": ones(32, 16), "w": ones(16, 8)}
G = {"w": ones(4, 8), "o": ones(8, 16)}
D = {"w": ones(16, 8), "o": ones(8, 1)}


LORA = {"u": ones(3, 16, 2), "v": ones(3, 2, 16)}
FROZEN = {"layers": ones(3, 16, 16), "table": ones(16, 16)}


def adapted(adapters, frozen, x):
    def tuned(adapters):
        h = x @ frozen["table"]
        for k in range(3):
            more = adapters["u"][k] @ adapters["v"][k]
            h = jnp.tanh(h @ (frozen["layers"][k] / 16 + more / 64))
        return jnp.mean(h)

    value, g = jax.value_and_grad(tuned)(adapters)
    return descend(adapters, g), value


def loss(p, x):
    return jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2)


def descend(p, g):
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, g)


def update(p, o, x):
    value, g = jax.value_and_grad(loss)(p, x)
    u, o = OPT.update(g, o, p)
    return optax.apply_updates(p, u), o, value


def average(p, e, o, x):
    p, o, value = update(p, o, x)
    return p, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, e, p), o, value


def autoencode(p, x):
    def error(p):
        made = jnp.tanh(x @ p["e"]) @ p["d"]
        return jnp.mean((made - x) ** 2), made

    g, made = jax.grad(error, has_aux=True)(p)
    return descend(p, g), made


def linear(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def gan(g, d, x, z):
    def score(d, g):
        fake = jnp.tanh(z @ g["w"]) @ g["o"]
        return jnp.mean(jnp.tanh(x @ d["w"]) @ d["o"]) - jnp.mean(fake @ d["w"])

    d = descend(d, jax.grad(score)(d, g))
    return descend(g, jax.grad(lambda g: -score(d, g))(g)), d, score(d, g)


def towards(target, p, x):
    g = jax.grad(lambda p: jnp.mean((x @ p["w"] - x @ target["w"]) ** 2))(p)
    return descend(p, g), x.sum()


def decode(p, cache, token):
    k, n = jnp.tanh(p["embed"][token] @ p["w"]), cache["n"]
    new = {"k": lax.dynamic_update_slice(cache["k"], k[:, None], (0, n, 0))}
    return p, new | {"n": n + 1}, jnp.einsum("btd,bd->bt", new["k"], k)


def haiku(params, state, opt_state, rng, batch):
    def error(p):
        h = batch["x"] @ p["w"] + jax.random.normal(rng, (8, 8))
        mean = 0.9 * state["bn"]["mean"] + 0.1 * h.mean(0)
        return jnp.mean(h**2), {"bn": {"mean": mean, "n": state["bn"]["n"] + 1}}

    (value, state), g = jax.value_and_grad(error, has_aux=True)(params)
    u, opt_state = OPT.update(g, opt_state, params)
    return optax.apply_updates(params, u), state, opt_state, {"loss": value}


def scaled(p, x):
    return jnp.mean((p["scale"][:, None] * x @ p["w"]) ** 2)


def by_name(*, params, opt_state, x):
    return update(params, opt_state, x)


def microbatched(o, p, xs):
    """The optimizer's state goes through a scan, and a branch."""

    def one(carry, x):
        p, o, value = update(*carry, x)
        return (p, lax.cond(value > 0, lambda: o, lambda: carry[1])), value

    (p, o), values = lax.scan(one, (p, o), xs)
    return values, o, p


def meaning(fn, *args, mesh=None, **named) -> StateArguments:
    mesh = mesh or jax.make_mesh((8,), ("data",))
    step = shardfn.fully_shard(fn, mesh, min_size=0)
    _, batch = step.plain.divide(args, named, step.storage.axes)
    return batch.meaning


def shown(found: StateArguments) -> str:
    """`argument <- result` for each state, what is read only, and the caches."""
    state = zip(found.arguments, found.places, strict=False)
    each = [f"{p}<-{keystr(path, simple=True, separator='.')}" for p, path in state]
    each += [f"reads {p}" for p in found.read_only]
    return " ".join([*each, *(f"cache {p}" for p, _ in found.caches)])


def between(pair, x):
    return jnp.mean((x @ pair[0]) ** 2) + jnp.sum(pair[0] * pair[1])


def swapped(s, x):
    value, g = jax.value_and_grad(between)(s, x)
    return (s[1], s[0] - 0.1 * g[0]), value


def rotated(s, x):
    g = jax.grad(lambda a: between((a, s["b"]), x))(s["a"])
    return {"a": s["b"], "b": s["c"], "c": s["a"] - g, "n": s["n"]}, 0.0


def pick(fn, *order):
    return lambda *args: tuple(fn(*args)[i] for i in order)


@pytest.mark.parametrize(
    "fn, args, expected",
    [
        # Several arguments, in any order, anywhere among the results.
        (update, (P, MU, X), "0<-0 1<-1"),
        (pick(update, 2, 0, 1), (P, MU, X), "0<-1 1<-2"),
        (pick(update, 1, 0, 2), (P, MU, X), "0<-1 1<-0"),
        (lambda p, o, x: (update(p, o, x)[:2], 0.0), (P, MU, X), "0<-0.0 1<-0.1"),
        (lambda p, o, x: list(update(p, o, x)), (P, MU, X), "0<-0 1<-1"),
        (
            lambda p, o, x: dict(zip("pol", update(p, o, x), strict=True)),
            (P, MU, X),
            "0<-p 1<-o",
        ),
        (lambda x, s: (0.0, update(*s, x)[:2]), (X, (P, MU)), "1<-1"),
        (lambda x, s: update(*s, x)[:2], (X, (P, MU)), "1<-"),
        (lambda k, s, b: (update(*s, b[0])[:2], {}), (0, (P, MU), (X,)), "1<-0"),
        (microbatched, (MU, P, ones(2, 8, 16)), "0<-1 1<-2"),
        (haiku, (P, {"bn": {"mean": ones(8), "n": 0}}, MU, jax.random.key(0), {"x": X}),
         "0<-0 1<-1 2<-2"),
        # As many rows in each leaf of averages as in others, but not the batch's.
        (lambda p, s, x: (p, {"m": 0.9 * s["m"] + 0.1 * (x @ p["w"]).mean(0)[None]}, 0),
         (P, {"m": ones(1, 8)}, X), "0<-0 1<-1"),
        # Elements change places in a history, and it counts what it has.
        (lambda p, h, x: (p, {"last": jnp.roll(h["last"], 1).at[0].set(loss(p, x)),
                              "n": h["n"] + 1}, 0.0),
         (P, {"last": ones(11), "n": 0}, X), "0<-0 1<-1"),
        # Arguments of one type: by what each becomes.
        (average, (P, P, MU, X), "0<-0 1<-1 2<-2"),
        (pick(average, 1, 0, 2), (P, P, MU, X), "0<-1 1<-0 2<-2"),
        (gan, (G, D, X, ones(8, 4)), "0<-0 1<-1"),
        # What is like the state, or a part of it, is stored like it and read only.
        (towards, (P, P, X), "1<-0 reads 0"),
        (lambda p, t, x: towards(t, p, x), (P, P, X), "0<-0 reads 1"),
        (lambda s, t, x: (update(*s, x + t["w"].sum())[:2], 0.0), ((P, MU), P, X),
         "0<-0 reads 1"),
        (lambda p, o, x: (jax.grad(loss)(p, x), update(p, o, x)[1]), (P, MU, X),
         "1<-1 reads 0"),
        (lambda w, t, x: (linear(w, x) + 0.0 * t, 0.0), (ones(16, 8), ones(16, 8), X),
         "0<-0 reads 1"),
        # So is a tree whose leaves are no rows of one batch: of three layers.
        (adapted, (LORA, FROZEN, X), "0<-0 reads 1"),
        (lambda f, a, x: adapted(a, f, x), (FROZEN, LORA, X), "1<-0 reads 0"),
        (lambda a, x, w: adapted(a, FROZEN, x * w["of"][:, None]),
         (LORA, X, {"of": ones(8), "classes": ones(5)}), "0<-0"),
        (lambda a, f: adapted(a, f, X), (LORA, FROZEN), "0<-0"),
        (lambda p, q, d: (update(p, MU, q @ jnp.concatenate([d["pos"], d["neg"]]).T
                                 @ jnp.ones((72, 16)))[0], 0.0),
         (P, X, {"pos": ones(8, 16), "neg": ones(64, 16)}), "0<-0"),
        # Its leaves change places, and one of them or all are updated.
        (swapped, ((ones(16, 8), ones(16, 8)), X), "0<-0"),
        (rotated, ({"a": ones(16, 8), "b": ones(16, 8), "c": ones(16, 8), "n": 0}, X),
         "0<-0"),
        (lambda s, o, x: (swapped(s, x)[0], jax.tree.map(jnp.negative, o), 0.0),
         ((ones(16, 8), ones(16, 8)), MU, X), "0<-0 1<-1"),
        # Nothing to store: no optimizer state, a count.
        (lambda p, o, x: (update(p, MU, x)[0], o, 0.0), (P, (), X), "0<-0"),
        (lambda p, n, x: (update(p, MU, x)[0], n + 1), (P, 0, X), "0<-0"),
        # Single arrays.
        (lambda w, x: (w, jnp.sort(x)), (ones(3), ones(16)), "0<-0"),
        (lambda s, x: (s, x * 2), (jnp.float32(0), X), "0<-0"),
        (lambda s, x: (s, jnp.roll(x, 1, 0)), (jnp.float32(0), X), "0<-0"),
        (lambda s, x: (s + 1, jnp.cumsum(x)), (jnp.float32(0), ones(16)), "0<-0"),
        (lambda w, x: (linear(w, x), 0.0), (ones(16, 8), X), "0<-0"),
        (lambda x, w: (0.0, linear(w, x)), (X, ones(16, 8)), "1<-1"),
        (lambda w, b, x: (linear(w, x), b - w.sum(0), 0.0), (ones(16, 8), ones(8), X),
         "0<-0 1<-1"),
        # One argument with everything in it, and one that is handed on.
        (lambda d: {**d, "p": update(d["p"], d["o"], d["x"])[0]},
         ({"p": P, "o": MU, "x": X},), "0<-"),
        (lambda p, x: (p, loss(p, x)), (P, X), "0<-0"),
        # What looks like the batch is no state, whatever the step makes of it.
        (lambda p, b: (autoencode(p, b["x"])[0], {"x": autoencode(p, b["x"])[1]}),
         (AE, {"x": X}), "0<-0"),
        (lambda p, b: (p, {"x": b["x"] - autoencode(p, b["x"])[1]}), (AE, {"x": X}),
         "0<-0"),
        (lambda p, b: (p, {"x": autoencode(p, b["x"])[1], "y": b["y"]}),
         (AE, {"x": X, "y": ones(8)}), "0<-0"),
        (lambda p, b: (p, {"x": autoencode(p, b["x"])[1], "n": b["n"] + 1}),
         (AE, {"x": X, "n": 0}), "0<-0"),
        (lambda p, b, y: (p, {"x": b["x"] * y[:, None]}), (AE, {"x": X}, ones(8)),
         "0<-0"),
        (lambda p, x: (p, x - autoencode(p, x)[1]), (AE, X), "0<-0"),
        (lambda b, p: ({"x": autoencode(p, b["x"])[1]}, autoencode(p, b["x"])[0]),
         ({"x": X}, AE), "1<-1"),
        # One leaf of the state has the batch's rows, another one does not.
        (lambda x, p: (0.0, descend(p, jax.grad(scaled)(p, x))),
         (X, {"w": ones(16, 8), "scale": ones(8)}), "1<-1"),
        # A cache is the batch's, also where the parameters do not come back.
        (decode, (EMBED, CACHE, TOKENS), "0<-0 cache 1"),
        (pick(decode, 1, 2), (EMBED, CACHE, TOKENS), "reads 0 cache 1"),
        (pick(decode, 2, 1), (EMBED, CACHE, TOKENS), "reads 0 cache 1"),
        (lambda c, p, t: decode(p, c, t)[1:], (CACHE, EMBED, TOKENS),
         "reads 1 cache 0"),
        (lambda p, h, x: (jnp.tanh(h + x @ p["w"]), 0.0), (P, ones(8, 8), X),
         "reads 0"),
        # Gradients are no state, beside one.
        (lambda p, x: (jax.grad(loss)(p, x), p), (P, X), "0<-1"),
        (lambda x, y, p: (x * y[:, None], update(p, MU, x)[0]), (X, ones(8), P),
         "2<-1"),
    ],
)  # fmt: skip
def test_what_comes_back_is_state(fn, args, expected) -> None:
    assert shown(meaning(fn, *args)) == expected


def flat(w, g):
    vector, unravel = jax.flatten_util.ravel_pytree({"a": w[:4], "b": w[4:]})
    rest = jax.flatten_util.ravel_pytree({"a": g[:4], "b": g[4:]})[0]
    return jnp.concatenate(list(unravel(vector - 0.1 * rest).values()))


def by_heads(x):
    return x.reshape(16, 2, 4).swapaxes(0, 1)


IN_OTHER_PLACES = {
    "cut and joined": lambda w, g: jnp.concatenate([w[:4], w[4:] - 0.1 * g[4:]]),
    "added to a part": lambda w, g: w.at[4:].add(-0.1 * g[4:]),
    "transposed": lambda w, g: (w.T - 0.1 * g.T).T,
    "mapped over columns": lambda w, g: jax.vmap(lambda a, b: a - b, 1, 1)(w, g),
    "ravelled": flat,
    "stacked": lambda w, g: jnp.stack([a - b for a, b in zip(w, g, strict=True)]),
    "by heads": lambda w, g: (by_heads(w) - by_heads(g)).swapaxes(0, 1).reshape(16, 8),
    "padded": lambda w, g: (jnp.pad(w, ((0, 3), (0, 0))) - jnp.pad(g, 3)[3:, 3:-3])[
        :16
    ],
    "in blocks": lambda w, g: lax.map(lambda x: x[0] - x[1], (w, g), batch_size=4),
    "in reverse": lambda w, g: (w[::-1] - 0.1 * g[::-1])[::-1],
}


@pytest.mark.parametrize("idiom", IN_OTHER_PLACES)
def test_what_is_updated_in_other_places_is_state(idiom: str) -> None:
    change = IN_OTHER_PLACES[idiom]

    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    def alone(w, x):
        return change(w, gradient(w, x)), 0.0

    def with_momentum(w, m, x):
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, gradient(w, x))
        return change(w, m), m, 0.0

    w = ones(16, 8)
    assert shown(meaning(alone, w, ones(32, 16))) == "0<-0"
    assert shown(meaning(with_momentum, w, w, ones(32, 16))) == "0<-0 1<-1"


def test_what_is_updated_in_place_comes_before_what_is_elsewhere() -> None:
    """A gradient with its penalty, on flat arrays, is no new value of the weights."""
    ravel = jax.flatten_util.ravel_pytree

    def step(p, m, x):
        grads = jax.grad(loss)(p, x)
        flat_grads, unravel = ravel(grads)
        penalized = unravel(flat_grads + 0.01 * ravel(p)[0])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
        return penalized, m, descend(p, grads)

    p = {"w": ones(8, 4), "b": ones(10)}
    assert shown(meaning(step, p, p, ones(16, 8))) == "0<-2 1<-1"


@pytest.mark.parametrize("idiom", IN_OTHER_PLACES)
def test_rows_that_go_up_a_gradient_in_other_places_are_as_rows_in_theirs(
    idiom: str,
) -> None:
    """As examples that an adversary makes."""
    change = IN_OTHER_PLACES[idiom]

    def step(fn):
        def adversary(p, x):
            value, g = jax.value_and_grad(loss)(p, x)
            up = jax.grad(lambda x: loss(p, x))(x)
            return descend(p, g), fn(x, -jnp.sign(up)), value

        return adversary

    p, x = {"w": ones(8, 4), "b": ones(10)}, ones(16, 8)
    plain = shown(meaning(step(lambda x, g: x - g), p, x))
    assert shown(meaning(step(change), p, x)) == plain == "0<-0"


def test_arguments_by_name() -> None:
    found = meaning(by_name, params=P, opt_state=MU, x=X)
    assert shown(found) == "opt_state<-1 params<-0"
    assert shown(meaning(update, P, x=X, o=MU)) == "0<-0 1<-1"


def test_a_step_per_device() -> None:
    def step(p, o, x):
        value, g = jax.value_and_grad(loss)(p, x)
        u, o = OPT.update(lax.pmean(g, "data"), o, p)
        return optax.apply_updates(p, u), o, lax.pmean(value, "data")

    assert shown(meaning(step, P, MU, X)) == "0<-0 1<-1"


def test_what_is_not_state_is_said() -> None:
    found = meaning(lambda p, b: (p, {"x": b["x"] * 2}), AE, {"x": X})
    assert found.notes == (
        "state: argument 0 ('p'), result 0",
        "argument 1 ('b') comes back as result 1 and may be a batch that the step "
        "changes: it is taken for one. If it is state, pass state_argnums=(0, 1)",
    )
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MU)
    found = meaning(lambda p, o, x: (*update(p, MU, x)[:1], narrow, p), P, MU, X)
    assert (
        "comes back as result 1 with leaf '0/count' changed from int32[]"
        in (found.notes[-1])
    )


BOTH = [
    "), which comes back as result 0, may be the state, or a batch that the step",
    "), which comes back as result 1, is state",
    "pass state_argnums=(0, 1) to fully_shard if all of that is, state_argnums=1 if",
]
FIRST = [
    "argument 0 ('x'), which comes back as result 0, may be the state, or a batch",
    "Pass state_argnums=0 to fully_shard if that is the state, and return it first",
]


def shifted(s, x):
    return jax.tree.map(lambda a: a + x.mean(), s)


@pytest.mark.parametrize(
    "step, args, what",
    [
        (lambda s, x: (shifted(s, x), 0.0), (Converted(ones(16, 8)), X), "0<-0"),
        (lambda x, s: (0.0, shifted(s, x)), (X, Converted(ones(16, 8))), "1<-1"),
        (
            lambda x, s: {"loss": 0.0, "new": {"model": shifted(s, x)}},
            (X, Converted(ones(16, 8))),
            "1<-new.model",
        ),
        (
            lambda s, x, t: (0.0, shifted(s, x), {"t": shifted(t["t"], x)}),
            (Converted(ones(16, 8)), X, {"t": Converted(ones(4, 4))}),
            "0<-1 2<-2",
        ),
    ],
)
def test_classes_that_take_arrays_alone(step, args, what) -> None:
    assert shown(meaning(step, *args)) == what
    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=8)
    expected, got = jax.jit(step)(*args), sharded(*args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b)


@pytest.mark.parametrize(
    "fn, args, parts",
    [
        (lambda x: x * 2, (X,), ["argument 0 ('x'), which comes back as the result,"]),
        (lambda x, w: linear(w, x), (X, ones(16, 8)), ["Pass state_argnums=1 to"]),
        (
            lambda t, c, w: decode({"w": w, "embed": w}, c, t)[1:],
            (TOKENS, CACHE, ones(8, 8)),
            ["('c'), which comes back as result 0, may", "return the parameters too"],
        ),
        # The first result may be a batch's, next to what is state for certain.
        (lambda x, p: (x * 2, update(p, MU, x)[0]), (X, P), BOTH),
        (lambda x, w: (x * 2, linear(w, x)), (X, ones(16, 8)), BOTH),
        (lambda b, p: ({"x": b["x"] * 2}, update(p, MU, b["x"])[0]), ({"x": X}, P),
         BOTH),
        # Or next to nothing that comes back.
        (lambda x, w: (x @ w @ w.T, 0.0), (X, ones(16, 8)), FIRST),
        (lambda x, w: (x * 2 + (x @ w).sum(), 0.0), (X, ones(16, 8)), FIRST),
        (lambda x, w: x - jax.grad(lambda x: (x @ w).mean())(x), (X, ones(16, 8)),
         ["Pass state_argnums=0 to fully_shard if that is the state. If it is"]),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_asked(fn, args, parts) -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        meaning(fn, *args)
    for part in ("cannot be told which arguments of", *parts):
        assert part in str(caught.value)


NO_POSITION = (
    " No position yet: '{}', passed by name. Let the step take each in front of any *, "
    "and of arguments that calls leave out."
)


def test_advice_for_what_is_passed_by_name() -> None:
    """`state_argnums` takes no names: the argument gets a position first."""

    def step(p, x, *, ema):
        return update(p, MU, x)[0], {"mean": 2 * ema["mean"]}

    ema = {"mean": ones(8, 16)}
    *_, note = meaning(step, P, X, ema=ema).notes
    assert note.endswith(
        "If it is state, pass state_argnums=(0, position of 'ema')."
        + NO_POSITION.format("ema").removesuffix(".")
    )
    followed = asked(lambda p, x, ema: step(p, x, ema=ema), (0, 2), P, X, ema)
    assert shown(followed) == "0<-0 2<-1"

    def swapped(x, *, p):
        return x * 2, update(p, MU, x)[0]

    with pytest.raises(shardfn.ShardingError) as caught:
        meaning(swapped, X, p=P)
    assert str(caught.value).endswith(
        "pass state_argnums=(0, position of 'p') to fully_shard if all of that is, "
        "state_argnums=position of 'p' if the other is a batch."
        + NO_POSITION.format("p")
    )


def test_advice_for_weights_that_are_passed_by_name() -> None:
    """Those that devices can divide are noted, those that they cannot are refused."""

    def step(p, x, *, frozen, y):
        frozen = {**frozen, "table": ones(16, 1) * frozen["table"].sum(0)}
        return adapted(p, frozen, x * y[:, None])

    def by_position(p, x, frozen, y):
        return step(p, x, frozen=frozen, y=y)

    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=0)
    said = "If it is parameters that are only read, name it in state_argnums=, too."
    said += NO_POSITION.format("frozen").removesuffix(".")
    stacks = {"layers": ones(8, 16, 16), "table": ones(16, 16)}
    notes = sharded.plan(LORA, X, frozen=stacks, y=ones(8)).notes
    assert any(note.endswith(said) for note in notes)
    followed = asked(by_position, (0, 2), LORA, X, stacks, ones(8))
    assert shown(followed) == "0<-0 reads 2"

    stacks = {"layers": ones(3, 16, 16), "table": ones(3, 16)}
    with pytest.raises(shardfn.ShardingError) as error:
        sharded(LORA, X, frozen=stacks, y=ones(8))
    assert f"{said}\n" in str(error.value)
    rows = "the leaves of argument 'frozen' have 3 rows, those of others 8."
    assert rows in str(error.value)
    followed = asked(by_position, (0, 2), LORA, X, stacks, ones(8))
    assert shown(followed) == "0<-0 reads 2"


def test_the_step_is_traced_once() -> None:
    traces = []

    def step(o, p, x):
        traces.append(x)
        return pick(update, 2, 1, 0)(p, o, x)

    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=0)
    sharded.plan(MU, P, X)
    assert len(traces) == 1


def test_leaves_are_named_after_their_arguments() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    step = shardfn.fully_shard(update, mesh, min_size=0, shard={"p/w": False})
    plan = step.plan(P, MU, X)
    assert "p/w" in {c.path for c in plan.collectives}
    assert "state: argument 0 ('p'), result 0; argument 1 ('o'), result 1" in str(plan)
    assert "state: argument 0 ('p'), result 0; argument 1 ('o')" in repr(step)


def together(fn, args: tuple[Any, ...], order) -> None:
    """Holds three steps of `fn` against the plain ones; `order` makes the next call's
    arguments of results and of the arguments."""
    mesh = jax.make_mesh((8,), ("data",))
    step = shardfn.fully_shard(fn, mesh, min_size=0)
    plain, sharded = args, args
    for _ in range(3):
        expected, out = jax.jit(fn)(*plain), step(*sharded)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
        jax.tree.map(close, step.unshard(out), expected)
        plain, sharded = order(expected, plain), order(out, sharded)


def test_three_steps_are_the_plain_ones() -> None:
    p = {"w": ones(16, 8), "b": ones(16)}

    def step(x, o, p):
        p, o, value = update(p, o, x)
        return {"loss": value, "new": (p, o)}

    args = X, OPT.init(p), p
    together(step, args, lambda out, args: (X, *reversed(out["new"])))


def test_a_cache_is_donated_and_keeps_its_split() -> None:
    step = shardfn.fully_shard(decode, jax.make_mesh((8,), ("data",)), min_size=0)
    plain, mine = (EMBED, CACHE), (EMBED, CACHE)
    for _ in range(3):
        *plain, expected = decode(*plain, jnp.arange(8))
        before, (*mine, out) = mine, step(*mine, jnp.arange(8))
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        np.testing.assert_allclose(mine[1]["k"], plain[1]["k"], rtol=1e-6)
        assert mine[1]["k"].sharding.spec == jax.P("data")
    assert before[1]["k"].is_deleted()
    assert not any(x.is_deleted() for x in CACHE.values())


def test_what_is_read_only_is_stored_like_state_and_not_donated() -> None:
    """Also leaves that eight devices do not divide, and the state itself."""
    p = {"w": ones(16, 8) / 7, "b": ones(10)}

    def step(p, t, x):
        value, g = jax.value_and_grad(loss)(p, x)
        near = jax.tree.map(lambda a, b: a - b, p, t)
        return descend(p, jax.tree.map(jnp.add, g, near)), value + loss(t, x)

    sharded = shardfn.fully_shard(step, jax.make_mesh((8,), ("data",)), min_size=0)
    plain, mine, teacher = p, p, sharded.shard(p)
    for _ in range(3):
        plain, value = jax.jit(step)(plain, p, X)
        mine, out = sharded(mine, teacher, X)
        np.testing.assert_allclose(out, value, rtol=1e-6)
        jax.tree.map(np.testing.assert_allclose, sharded.unshard(mine), plain)
    mine, out = sharded(mine, mine, X)
    np.testing.assert_allclose(out, jax.jit(step)(plain, plain, X)[1], rtol=1e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves(teacher))
    assert "; read only: argument 1 ('t')" in repr(sharded)
    gathered = [c for c in sharded.plan(p, p, X).collectives if c.path == "t/w"]
    assert [c.op for c in gathered] == ["all_gather"]
    assert sharded.lower(mine, teacher, X).compile() is not None


@pytest.mark.parametrize("asked", [(0, 1), (1, 0), "auto"], ids=str)
def test_frozen_weights_are_stored_like_state_and_read_only(asked) -> None:
    """They are named: where only layers are frozen, three may be rows."""
    frozen = FROZEN if asked == "auto" else {k: FROZEN["layers"] / 3 for k in "ab"}

    def step(adapters, frozen, x):
        if "table" not in frozen:
            frozen = {"layers": frozen["a"] + frozen["b"], "table": FROZEN["table"]}
        return adapted(adapters, frozen, x)

    mesh = jax.make_mesh((8,), ("data",))
    sharded = shardfn.fully_shard(
        step, mesh, min_size=0, state_argnums=asked, stationary=False
    )
    plain, mine, kept = LORA, sharded.shard(LORA), sharded.shard(frozen)
    for _ in range(3):
        plain, value = jax.jit(step)(plain, frozen, X)
        mine, out = sharded(mine, kept, X)
        np.testing.assert_allclose(out, value, rtol=1e-5)
        for k, x in sharded.unshard(mine).items():
            np.testing.assert_allclose(x, plain[k], rtol=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))
    assert "; read only: argument 1 ('frozen'))" in repr(sharded)
    for x in jax.tree.leaves(kept):
        assert 8 * x.addressable_shards[0].data.size == x.size


def test_trees_that_may_be_frozen_weights_are_said() -> None:
    """Eight devices divide their rows."""
    frozen = {"layers": ones(8, 16, 16), "table": ones(16, 16)}
    plan = shardfn.fully_shard(adapted, jax.make_mesh((8,), ("data",))).plan(
        LORA, frozen, X
    )
    said = (
        "argument 1 ('frozen') does not come back: it is taken for a batch, though its "
        "leaves differ in rows. If it is parameters that are only read, name it in "
        "state_argnums=, too"
    )
    assert said in plan.notes
    assert "differ in rows" not in str(meaning(update, P, MU, X).notes)


def asked(fn, argnums, *args) -> StateArguments:
    mesh = jax.make_mesh((8,), ("data",))
    step = shardfn.fully_shard(fn, mesh, min_size=0, state_argnums=argnums)
    _, batch = step.plain.divide(args, {}, step.storage.axes)
    return batch.meaning


@pytest.mark.parametrize(
    "fn, argnums, args, expected",
    [
        # A teacher of the student's types, and an array of those of one of its leaves.
        (lambda p, t, x: towards(t, p, x), (0, 1), (P, P, X), "0<-0 reads 1"),
        (lambda p, w, x: (update(p, MU, x + w.sum())[0], 0.0), (0, 1),
         (P, ones(16, 8), X), "0<-0 reads 1"),
        (lambda w, p, x: (update(p, MU, x + w.sum())[0], 0.0), (1, 0),
         (ones(16, 8), P, X), "1<-0 reads 0"),
        (adapted, (1, 0), (LORA, FROZEN, X), "0<-0 reads 1"),
        (update, (0, 1), (P, MU, X), "0<-0 1<-1"),
        # What comes back in another place is not read only: planning says so.
        (pick(update, 2, 0, 1), (0, 1), (P, MU, X), "0<-0 1<-1"),
    ],
)  # fmt: skip
def test_what_is_named_and_does_not_come_back_is_read_only(
    fn, argnums, args, expected
) -> None:
    assert shown(asked(fn, argnums, *args)) == expected


def test_weights_that_may_be_rows_are_asked_about() -> None:
    step = shardfn.fully_shard(adapted, jax.make_mesh((8,), ("data",)), min_size=0)
    stacks = {"layers": ones(3, 16, 16), "table": ones(3, 16)}
    with pytest.raises(shardfn.ShardingError) as error:
        step(LORA, stacks, X)
    expected = (
        "  the leaves of argument 'frozen' have 3 rows, those of others 8. It is taken "
        "for a batch, since it does not come back, and has not the structure, shapes "
        "and dtypes of the state or a part of it. If it is parameters that are only "
        "read, name it in state_argnums=, too\n"
    )
    assert expected in str(error.value)


def test_frozen_parameters_with_a_cache() -> None:
    step = shardfn.fully_shard(
        pick(decode, 1, 2), jax.make_mesh((8,), ("data",)), min_size=0
    )
    params, plain, mine = step.shard(EMBED), CACHE, CACHE
    for _ in range(3):
        _, plain, expected = decode(EMBED, plain, TOKENS)
        before, (mine, out) = mine, step(params, mine, TOKENS)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        np.testing.assert_allclose(mine["k"], plain["k"], rtol=1e-6)
        assert mine["k"].sharding.spec == jax.P("data")
    assert before["k"].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


MASKS = [
    lambda s, g: (g[0] * s[1], g[1]),
    lambda s, g: (s[1], g[0]),
]


@pytest.mark.parametrize("returned", range(len(MASKS)))
def test_a_gradient_that_meets_another_leaf_is_no_new_state(returned: int) -> None:
    """Such as one that is masked: the leaves have not just changed places."""

    def gradient(s, x):
        return MASKS[returned](s, jax.grad(between)(s, x)), 0.0

    with pytest.raises(shardfn.ShardingError) as caught:
        meaning(gradient, (ones(16, 8), ones(16, 8)), X)
    for part in (
        "result 0, which has the form of argument 0 ('s'), is a gradient",
        "If it is the new state all the same, pass state_argnums=0 to fully_shard.",
    ):
        assert part in str(caught.value)


def test_leaves_that_change_places_are_the_plain_ones() -> None:
    state = jnp.ones((16, 8)), jnp.full((16, 8), 2.0)
    step = shardfn.fully_shard(swapped, jax.make_mesh((8,), ("data",)), min_size=0)
    mine, plain = step.shard(state), state
    for _ in range(3):
        (mine, loss), (plain, expected) = step(mine, X), swapped(plain, X)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), mine, plain)


GRADIENTS = [
    (lambda value, g: (g, value), "result 0"),
    (lambda value, g: (value, g), "result 1"),
    (lambda value, g: g, "the result"),
    (lambda value, g: (jax.tree.map(lambda v: v.clip(-1, 1), g), value), "result 0"),
    (lambda value, g: {"g": jax.tree.map(lambda v: v / 2, g)}, "result ['g']"),
]


@pytest.mark.parametrize("returned, where", GRADIENTS)
@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_a_gradient_is_no_new_state(penalty: float, returned, where: str) -> None:
    """Also where a penalty adds a multiple of the parameters to it: what comes back
    would be donated, and a gradient would take its place."""

    def gradient(params, x):
        def penalized(p):
            return loss(p, x) + penalty * sum(jnp.sum(v**2) for v in p.values())

        return returned(*jax.value_and_grad(penalized)(params))

    step = shardfn.fully_shard(gradient, jax.make_mesh((8,), ("data",)))
    params = step.shard(P)
    with pytest.raises(shardfn.ShardingError) as caught:
        step(params, X)
    for part in (
        f"returns no state: {where}, which has the form of argument 0 ('params'), is a "
        "gradient, and no argument comes back updated",
        "Update the parameters in the step, and return them",
        "the parameters, too, unchanged: (params, grads)",
        "new state all the same, "
        + "return it first, and " * (where not in ("result 0", "the result"))
        + "pass state_argnums=0 to fully_shard.",
    ):
        assert part in str(caught.value)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_a_gradient_summed_over_microbatches_or_devices_is_no_new_state() -> None:
    def over_devices(p, x):
        return lax.pmean(jax.grad(loss)(p, x), "data"), 0.0

    def over_microbatches(p, x):
        def one(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, x)), 0.0

        return lax.scan(one, jax.tree.map(jnp.zeros_like, p), x.reshape(2, 4, 16))

    for step in (over_devices, over_microbatches):
        with pytest.raises(shardfn.ShardingError, match="is a gradient"):
            meaning(step, P, X)


@pytest.mark.parametrize("spec", [None, (None, jax.P()), (jax.P("data"), None)])
def test_batch_spec_may_count_arguments_that_are_found_to_be_read_only(spec) -> None:
    """A caller need not know that a teacher is stored as the state is."""

    def distil(state, x, teacher):
        return {"w": state["w"] - 0.5 * (state["w"] - teacher["w"])}, jnp.sum(x)

    mesh = jax.make_mesh((8,), ("data",))
    step = shardfn.fully_shard(distil, mesh, min_size=0, batch_spec=spec, donate=False)
    state, x = {"w": jnp.arange(21.0).reshape(7, 3)}, jnp.ones((8, 3))
    got, total = step(step.shard(state), x, step.shard(state))
    assert "read only: argument 2 ('teacher')" in repr(step) and total == 24
    np.testing.assert_array_equal(step.unshard(got)["w"], state["w"])
