"""In: steps with several gradients, or gradients in gradients. Out: the plain step's
state, and plans in which every forward and backward pass is asked for what is asked.
"""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from sharded_and_plain import make_mesh

import shardfn

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 5)).astype(np.float32)
RATE = 0.125


def net(*sizes: int) -> dict[str, np.ndarray]:
    draw = lambda a, b: (RNG.normal(size=(a, b)) / 3).astype(np.float32)  # noqa: E731
    return {f"w{i}": draw(*pair) for i, pair in enumerate(pairwise(sizes))}


def apply(params, x):
    return jnp.tanh(x @ params["w0"]) @ params["w1"]


def loss(params, x):
    return (apply(params, x) ** 2).mean()


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def actor_critic(state, x):
    value, g = jax.value_and_grad(loss)(state["critic"], x)
    critic = descend(state["critic"], g)
    g = jax.grad(lambda p: (apply(p, x) ** 2).mean() * value)(state["actor"])
    return {"actor": descend(state["actor"], g), "critic": critic}, value


def gan(state, x):
    def judge_loss(judge):
        fake = apply(state["maker"], x)
        return (apply(judge, x) ** 2).mean() + ((apply(judge, fake) - 1) ** 2).mean()

    judge = descend(state["judge"], jax.grad(judge_loss)(state["judge"]))
    maker_loss = lambda maker: (apply(judge, apply(maker, x)) ** 2).mean()  # noqa: E731
    value, g = jax.value_and_grad(maker_loss)(state["maker"])
    return {"judge": judge, "maker": descend(state["maker"], g)}, value


def sometimes(state, x):
    """The second network is trained in one branch."""
    critic = descend(state["critic"], jax.grad(loss)(state["critic"], x))
    train = lambda p: descend(p, jax.grad(loss)(p, x))  # noqa: E731
    actor = lax.cond(X[0, 0] > -9, train, lambda p: p, state["actor"])
    return {"actor": actor, "critic": critic}, ()


def penalty(state, x):
    def penalized(params):
        slopes = jax.grad(lambda x: apply(params, x).sum())(x)
        return loss(params, x) + ((jnp.sqrt((slopes**2).sum(-1) + 1.0) - 1) ** 2).mean()

    return descend(state, jax.grad(penalized)(state)), ()


def maml(state, x):
    def adapted(params):
        return loss(descend(params, jax.grad(loss)(params, x)), x * 0.5)

    return descend(state, jax.grad(adapted)(state)), ()


def sam(state, x):
    """Two gradients, the second where the first leads to."""
    g = jax.grad(loss)(state, x)
    size = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(g)))
    worst = jax.tree.map(lambda p, g: p + 0.05 * g / (size + 1e-3), state, g)
    return descend(state, jax.grad(loss)(worst, x)), ()


def teacher(state, x):
    value, g = jax.value_and_grad(loss)(state["student"], x)
    student = descend(state["student"], g)
    old = (apply(state["teacher"], x) ** 2).sum()
    ema = jax.tree.map(lambda t, s: 0.75 * t + 0.25 * s, state["teacher"], student)
    return {"student": student, "teacher": ema}, {"loss": value, "teacher": old}


def evaluated(state, x):
    state = descend(state, jax.grad(loss)(state, x))
    return state, (apply(state, x) ** 2).sum()


def _state(*names: str) -> dict:
    return {name: net(5, 7, 5) for name in names}


STEPS: dict[str, tuple[Callable, dict]] = {
    "actor_critic": (actor_critic, _state("actor", "critic")),
    "gan": (gan, _state("judge", "maker")),
    "sometimes": (sometimes, _state("actor", "critic")),
    "penalty": (penalty, net(5, 7, 5)),
    "maml": (maml, net(5, 7, 5)),
    "sam": (sam, net(5, 7, 5)),
    "teacher": (teacher, _state("student", "teacher")),
    "evaluated": (evaluated, net(5, 7, 5)),
}

Lines = Counter[tuple[str, str, str, str]]


def lines(name: str, **options) -> Lines:
    """Runs per step by leaf, phase, operation and dtype, metrics left out."""
    step, state = STEPS[name]
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=0, **options)
    found: Lines = Counter()
    for c in sharded.plan(state, X).collectives:
        if c.shape:
            found[c.path, c.phase, c.op, c.dtype] += c.times or 1
    return found


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}])
@pytest.mark.parametrize("name", STEPS)
def test_the_state_is_the_plain_step_s(name: str, options: dict) -> None:
    step, state = STEPS[name]
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=0, **options)
    plain, ours = jax.jit(step), sharded.shard(state)
    expected = state
    for i in range(3):
        expected, measured = plain(expected, X + i)
        ours, metrics = sharded(ours, X + i)
        both = (expected, measured), (sharded.unshard(ours), metrics)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), *both)


@pytest.mark.parametrize("name", STEPS)
def test_dtypes_reach_every_pass_of_every_gradient(name: str) -> None:
    """Parameters cross the wire in `gather_dtype`, gradients in `reduce_dtype`: there
    are no other moves of leaves in these steps."""
    found = lines(name, gather_dtype="bfloat16", reduce_dtype="float16")
    for path, phase, op, dtype in found:
        assert path, (phase, op)
        assert dtype == ("bfloat16" if op == "all_gather" else "float16"), (path, phase)
    paths = {path for path, *_ in found}
    assert paths == set(map(shardfn_path, leaves_of(STEPS[name][1])))


def leaves_of(state) -> list[tuple]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]


def shardfn_path(path: tuple) -> str:
    return "/".join(entry.key for entry in path)


def moves(*leaves: str, passes: str) -> Lines:
    """The moves of leaves in `passes`: `F` and `B` gather in the forward and the
    backward pass, `S` scatters a gradient."""
    meant = {
        "F": ("forward", "all_gather"),
        "B": ("backward", "all_gather"),
        "S": ("backward", "psum_scatter"),
    }
    return Counter((leaf, *meant[p], "float32") for leaf in leaves for p in passes)


def test_a_second_network_has_passes_of_its_own() -> None:
    """Backwards only the second layer's weights are needed: the batch has no
    gradient."""
    again = moves("actor/w0", "critic/w0", passes="FS")
    again += moves("actor/w1", "critic/w1", passes="FBS")
    assert lines("actor_critic", reshard_after_forward=True) == again
    assert lines("sometimes", reshard_after_forward=True) == again
    kept = moves("actor/w0", "critic/w0", "actor/w1", "critic/w1", passes="FS")
    assert lines("actor_critic", reshard_after_forward=False) == kept


def test_networks_in_each_other_s_loss() -> None:
    """The judge's loss runs the judge both ways, that of the maker both networks, with
    the new judge. The maker runs forward in both: on the same batch that is once."""
    again = moves("judge/w0", passes="FS") + moves("judge/w1", passes="FBS")
    again += moves("maker/w0", passes="FS") + moves("maker/w1", passes="FBS")
    again += moves("judge/w0", "judge/w1", passes="FB")
    assert lines("gan", reshard_after_forward=True) == again


def test_a_gradient_inside_a_loss_is_a_pass_of_its_own() -> None:
    """Inner forward and backward passes gather, each, and so does the way back through
    both; the state is updated once."""
    found = lines("penalty", reshard_after_forward=True)
    assert found["w0", "forward", "all_gather", "float32"] == 2
    assert found["w1", "forward", "all_gather", "float32"] == 2
    assert {phase for _, phase, *_ in found} == {"forward", "backward"}
    once = lines("penalty", reshard_after_forward=False)
    assert once == moves("w0", "w1", passes="FS")


def test_a_pass_of_its_own_is_a_forward_pass() -> None:
    """A teacher's and an evaluation's, wherever they stand; the mean of the teacher and
    the student moves nothing."""
    student = moves("student/w0", "student/w1", passes="FS")
    assert lines("teacher") == student + moves("teacher/w0", "teacher/w1", passes="F")
    assert lines("evaluated") == moves("w0", "w1", passes="FFS")


def test_the_plan_says_which_gradient() -> None:
    step, state = STEPS["gan"]
    sharded = shardfn.fully_shard(step, make_mesh("4"), min_size=0)
    scattered = [
        (c.path, c.gradient)
        for c in sharded.plan(state, X).collectives
        if c.op == "psum_scatter"
    ]
    assert sorted(scattered) == [
        ("judge/w0", 0),
        ("judge/w1", 0),
        ("maker/w0", 1),
        ("maker/w1", 1),
    ]
