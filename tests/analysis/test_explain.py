"""In: plans. Out: what they say of a leaf or a line: where it is stored, what moves it,
and which rule, option, pass or threshold decided that.
"""

import itertools
import re
import textwrap

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from plan_helpers import cpu_mesh, shard, shard_fn

import shardfn
from shardfn._propagation import rounds
from shardfn._schedule.pipeline import PASSES

HERE = "test_explain.py"


def mesh(size: int = 4) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), ("data",), devices=jax.devices()[:size])


def loss_fn(w, x):
    h = jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.sum((h + w["bias"][None]) ** 2)


def train_step(w, x):
    grads = jax.grad(loss_fn)(w, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), ()


SHAPES = {"up": (16, 512), "down": (512, 18), "bias": (18,)}, (96, 16)

UP = """
up: float32 16x512, stored split over data along dimension 1
  4 devices divide dimension 1 of 512, in parts that fill TPU tiles (limits.TPU_TILE)
  forward all_gather over data: 16x512 float32, 24.0 KiB sent, at FILE:N (loss_fn)
    propagate: dot_general `b a, a c -> b c  reduce={a}`: data splits b, the batch's
    rows; it has no b, so it is gathered
  backward psum_scatter over data: 512x16 float32, 24.0 KiB sent, at FILE:N (loss_fn)
    propagate: dot_general `a b, a c -> b c  reduce={a}`: data splits a, which it
    reduces; its consumers take it split over data along dimension 0, so its terms are
    reduce-scattered
"""

BIAS = """
bias: float32 18, whole on every device
  18 elements are fewer than min_size=64
  backward all_reduce over data: 18 float32, 108 B sent, at FILE:N (loss_fn)
    propagate: reduce_sum `a b -> b  reduce={a}`: data splits a, which it reduces; its
    consumers take it whole, so its terms are all-reduced
"""


@pytest.fixture(scope="module")
def plan() -> shardfn.Plan:
    return shard_fn(train_step, mesh(), *SHAPES, min_size=64).plan


def explained(plan: shardfn.Plan, pattern: str) -> str:
    """With line numbers left out, and long lines wrapped."""
    text = re.sub(rf"{HERE}:\d+", "FILE:N", plan.explain(pattern))
    lines = (
        textwrap.wrap(
            line,
            88,
            subsequent_indent=line[: len(line) - len(line.lstrip())],
            break_on_hyphens=False,
        )
        or [""]
        for line in text.split("\n")
    )
    return "\n".join(itertools.chain(*lines))


def test_a_leaf_is_explained_in_a_few_lines(plan) -> None:
    assert explained(plan, "up") == UP.strip()
    assert explained(plan, "bias") == BIAS.strip()


def test_a_pattern_explains_each_leaf_that_it_names(plan) -> None:
    blocks = explained(plan, "*").split("\n\n")
    assert [block.split(":")[0] for block in blocks] == ["bias", "down", "up"]
    assert blocks[0] == BIAS.strip() and blocks[2] == UP.strip()


def test_a_line_of_the_users_is_explained(plan) -> None:
    first = loss_fn.__code__.co_firstlineno + 1
    text = explained(plan, f"{HERE}:{first}")
    assert text.count("all_gather over data") == 2 and ", for up\n" in text
    update = train_step.__code__.co_firstlineno + 2
    text = explained(plan, f"{HERE}:{update}")
    assert text.startswith("FILE:N (train_step.<locals>.<lambda>): nothing moves: its ")
    assert "\n  sub `a b, a b -> a b`: data splits " in text


def test_an_unknown_name_is_refused(plan) -> None:
    with pytest.raises(
        shardfn.ShardingError,
        match=r"^the plan has no leaf and no collective that 'upp' names\.\n"
        rf"  explain was called at {HERE}:\d+ \(.*\)\n"
        r"Did you mean 'up'\? The leaves are 'bias', 'down', 'up'\. A pattern names "
        rf".* Collectives are at {HERE}:\d+",
    ):
        plan.explain("upp")


def test_a_line_without_operations_names_the_nearest(plan) -> None:
    first = loss_fn.__code__.co_firstlineno
    with pytest.raises(shardfn.ShardingError) as error:
        plan.explain(f"{HERE}:{first}")
    lines = str(error.value).split("\n")
    assert lines[0] == f"no operation of the step is at {HERE}:{first}."
    assert lines[2].startswith(
        f"The nearest are at {HERE}:{first + 1}, {HERE}:{first + 2}, "
    )


def test_a_leaf_that_an_own_axis_splits_is_not_left_to_xla() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    plan = shard_fn(
        lambda w, x: (w * jnp.sum(x), ()),
        mesh,
        (8,),
        (8, 16),
        axis=("a", "b"),
        shard=("a", "b"),
        min_size=0,
    ).plan
    assert "XLA" not in plan.explain("*")
    assert "no other dimension" in plan.explain("*")


# Every decision says what decided


STAGES = {"propagate", "loop_invariants", "keep_gathered", *(p.name for p in PASSES)}


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name, options",
    [
        ("gpt_scan_remat_bf16", {"bucket_bytes": 2**20, "reduce_dtype": "float32"}),
        ("gpt_unrolled_remat", {"prefetch": 1, "reshard_after_forward": 2}),
        ("gpt_tied", {}),
        ("accumulate_scan", {"accumulate": "scatter"}),
        ("loops_and_branches", {}),
        ("loss_scale_cond", {"reshard_after_forward": False}),
    ],
)
def test_every_collective_says_which_rule_or_pass_decided(name, options) -> None:
    case = shard(programs.get(name), mesh(), min_size=8, **options)
    for line in case.plan.collectives:
        assert line.why, line
        for why in line.why:
            lines = why.lines()
            assert {text.split(": ")[0] for text in lines} <= STAGES, lines
            assert lines[0].startswith("propagate: ") and "by hand" not in lines[0]
    for leaf in case.plan.leaves:
        assert leaf.why and leaf.name in case.plan.explain(leaf.name)


def layered(w, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return jnp.sum(lax.scan(jax.checkpoint(layer), x @ w["in"], w["layers"])[0] ** 2)


def grown(w, x):
    def loss_fn(w):
        return jnp.sum(x * jnp.broadcast_to(w["in"], x.shape))

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda w, g: w - g, w, grads), loss


def descend(w, x):
    loss, grads = jax.value_and_grad(layered)(w, x)
    return jax.tree.map(lambda w, g: w - g, w, grads), loss


def microbatched(w, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(layered)(w, x)), None

    zeros = jax.tree.map(jnp.zeros_like, w)
    grads, _ = lax.scan(add, zeros, x.reshape(2, 8, 16))
    return jax.tree.map(lambda w, g: w - g, w, grads), ()


def taught(w, x):
    """The second loss takes what the first has made, and something else of it."""

    def loss_fn(w, h):
        return jnp.sum(jnp.tanh(h @ w["in"]) ** 2)

    loss, grads = jax.value_and_grad(layered)(w, x)
    more = jax.grad(loss_fn)(w, jnp.tanh(x @ grads["in"]))
    return jax.tree.map(lambda w, g, m: w - g - m, w, grads, more), loss


def picked(w, x):
    """Rows of a table: of `w["table"]` few, of `w["small"]` many."""
    rows = jnp.arange(8) % 4
    few = w["table"].at[rows].get(mode="clip")
    many = w["small"].at[rows].get(mode="clip")
    return w, jnp.sum(few**2) + jnp.sum(many) + jnp.sum(x)


STACK = {"in": (16, 16), "layers": (3, 16, 16)}
TABLES = {"table": (64, 5), "small": (8, 5)}

REASONS = {
    "an option keeps": (
        descend,
        {"reshard_after_forward": False},
        "layers",
        r"keep_gathered: also for dot_general at .*: reshard_after_forward=False keeps",
    ),
    "an option gathers ahead": (
        descend,
        {"prefetch": 1},
        "layers",
        "prefetch: gathered ahead, as prefetch=1 asks",
    ),
    "an option casts": (
        descend,
        {"gather_dtype": "bfloat16"},
        "in",
        "wire_dtypes: moves in bfloat16: gather_dtype asks for it",
    ),
    "an option joins": (
        train_step,
        {"bucket_bytes": 2**20},
        "up",
        "bucket: one of the moves of .* that are one collective, as bucket_bytes asks",
    ),
    "a result that is larger": (
        grown,
        {},
        "in",
        r"propagate: the result has more than 2 times .* \(limits\.GROWTH\)",
    ),
    "few bytes in between": (
        descend,
        {},
        "layers",
        "share_gathers: also for dot_general at .*: one gather serves its layer",
    ),
    "a loop holds little": (
        microbatched,
        {},
        "in",
        "loop_invariants: left the loop: of what its iterations share, .*, all but the "
        r"largest takes .*, at most 64\.0 MiB \(limits\.LOOP_BYTES\)",
    ),
    "sums of a loop": (
        microbatched,
        {},
        "in",
        r"propagate: the sums that it carries take .* together, at most 64\.0 MiB "
        r"\(limits\.LOOP_BYTES, limits\.LOOP_LIVE\), so they are reduced once, behind",
    ),
    "few rows of a table": (
        picked,
        {},
        HERE,
        r"it selects at most 1/2 of the elements, .* \(limits\.FEW_SELECTED\)",
    ),
    "most rows of a table": (
        picked,
        {},
        "small",
        r"it selects more than 1/2 of the elements, .* \(limits\.FEW_SELECTED\)",
    ),
    "an option stores": (
        descend,
        {"shard": {"in": False}},
        "in",
        r"whole on every device\n  shard=False asks for it",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_decided_is_said(name: str) -> None:
    step, options, leaf, text = REASONS[name]
    shapes = {
        train_step: SHAPES,
        microbatched: (STACK, (16, 16)),
        grown: ({"in": (16, 16)}, (8, 16, 16)),
        picked: (TABLES, (8, 4)),
    }.get(step, (STACK, (8, 16)))
    plan = shard_fn(step, mesh(), *shapes, **options).plan
    assert re.search(text, plan.explain(leaf)), plan.explain(leaf)


def test_rounds_that_went_on_are_said(monkeypatch) -> None:
    monkeypatch.setattr(rounds, "FREE_ROUNDS", 0)
    plan = shard_fn(taught, mesh(), STACK, (8, 16)).plan
    text = "still changed after 5 rounds, and could only grow from then on"
    assert f"propagate: what is preferred of it {text} (limits.FREE_ROUNDS)" in (
        plan.explain("*")
    )


@pytest.mark.parametrize(
    "shape, text",
    [
        ((21, 5), r"no dimension divides by 4, and .* 1% \(limits\.PADDING_SHARE\)"),
        ((401, 5), r"401 is the least, and at most 1% \(limits\.PADDING_SHARE\)"),
        ((6, 40), r"4 devices divide dimension 1 of 40$"),
        ((4, 512), r"fill TPU tiles \(limits\.TPU_TILE\)$"),
        ((512, 512), r"it is the first of at least 128 \(limits\.FEATURE_ELEMENTS\)$"),
        (
            (32, 64, 8),
            r"all below 128 \(limits\.FEATURE_ELEMENTS\), it is the largest$",
        ),
    ],
)
def test_how_a_leaf_is_stored_is_said(shape, text) -> None:
    plan = shard_fn(lambda w, x: (w, x), mesh(), {"a": shape}, (8, 4)).plan
    text_of_leaf, stays = plan.explain("a").rsplit("\n", 1)
    assert re.search(text, text_of_leaf), text_of_leaf
    assert stays == "  nothing moves it: every operation takes it as it is stored"


@pytest.mark.parametrize(
    "shape, stored",
    [
        ((64, 64), "stored split over data along dimension 0"),
        ((1001, 7), "stored split over data along dimension 0, padded to 1008x7"),
        ((3, 5, 7), "stored split over data flattened, padded to 112"),
        ((2, 12), "stored split over data flattened, as 24"),
    ],
)
def test_a_shape_that_is_stored_otherwise_is_said(shape, stored) -> None:
    """JAX has no sharding for it: that of the leaf is the whole one's."""
    step = shardfn.fully_shard(lambda w, x: (w, x.sum()), cpu_mesh(8), min_size=0)
    w = step.shard(jnp.ones(shape))
    (first, *_) = step.plan(w, jnp.ones(8)).explain("state").splitlines()
    assert first == f"state: float32 {'x'.join(map(str, shape))}, {stored}"
    array = getattr(w, "array", w)
    assert array.sharding.spec == jax.P("data")
    assert ("padded to" in stored or ", as" in stored) == (array is not w)
    assert step.shardings(w) == w.sharding
