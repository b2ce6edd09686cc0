"""In: steps and what compilers, or an editor, made of them. Out: `Plan.verify` says of
each planned collective whether it is there, and in which form; `verify=` acts on it.
"""

import re
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from jax import lax
from plan_helpers import CPU_MERGES_GATHERS, QUICK, Sharded, cpu_mesh, shard_fn

import shardfn
from shardfn._core import compat
from shardfn._lowering import interpreter
from shardfn.analysis import targets

LAYERS, WIDTH, ROWS = 3, 64, 16


def scanned(w, x):
    """Gathers a layer forward and backward, scatters its gradient; sums the loss."""

    def loss_fn(w):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = lax.scan(jax.checkpoint(layer), x, w)
        return jnp.mean(h**2)

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return w - grads, loss


def unrolled(w, x):
    """The same without a loop."""

    def loss_fn(w):
        h = x
        for layer in w:
            h = jnp.tanh(h @ layer)
        return jnp.mean(h**2)

    loss, grads = jax.value_and_grad(loss_fn)(w)
    return jax.tree.map(lambda a, b: a - b, w, grads), loss


def low(step: Callable) -> Callable:
    """`step` computing in bfloat16."""

    def cast(w, x):
        new, loss = step(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
        return new.astype(jnp.float32), loss

    return cast


STACK, BATCH = (LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)


@pytest.fixture(scope="module")
def loop() -> tuple[Sharded, str]:
    """`scanned` on CPU devices, compiled."""
    sharded = shard_fn(scanned, cpu_mesh(8), STACK, BATCH)
    return sharded, sharded.compile(**QUICK).as_text()


def statuses(checked: shardfn.Verification) -> list[tuple[str, str, str]]:
    return [(c.line.phase, c.line.op, c.status) for c in checked.lines]


FORWARD, BACKWARD, SCATTER, LOSS = (
    ("forward", "all_gather", "present"),
    ("backward", "all_gather", "present"),
    ("backward", "psum_scatter", "present"),
    ("forward", "all_reduce", "present"),
)


def test_every_line_is_found(loop) -> None:
    sharded, text = loop
    checked = sharded.plan.verify(text)
    assert sorted(statuses(checked)) == sorted([FORWARD, BACKWARD, SCATTER, LOSS])
    assert checked.ok and checked.exact and checked.problems() == ""
    assert checked.wire_bytes == checked.planned_bytes == sharded.plan.wire_bytes
    assert [c.runs for c in checked.lines if c.line.path] == [LAYERS] * 3
    assert checked.overlapped_bytes == 0
    table = str(checked).splitlines()
    assert table[0].split() == (
        "status phase operation axis shape dtype times wire overlapped for".split()
    )
    assert "as planned: 4 present, 0 extra" in table


def line_of(text: str, opcode: str, at: int = 0) -> str:
    """The `at`-th instruction with this opcode."""
    return [x for x in text.splitlines() if f" {opcode}(" in x][at]


def without(text: str, opcode: str, at: int = 0) -> str:
    """The program with one collective replaced by something else."""
    line = line_of(text, opcode, at)
    return text.replace(line, line.replace(f" {opcode}(", " custom-call("))


def verify_edited(
    loop: tuple[Sharded, str], edit: Callable[[str], str]
) -> shardfn.Verification:
    sharded, text = loop
    edited = edit(text)
    assert edited != text
    return sharded.plan.verify(edited)


@pytest.mark.parametrize("opcode", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_missing_collective_is_missed(loop, opcode) -> None:
    checked = verify_edited(loop, lambda text: without(text, opcode))
    (wrong,) = (c for c in checked.lines if not c.ok)
    assert wrong.line.op.replace("_", "-").startswith(
        {"reduce-scatter": "psum-scatter"}.get(opcode, opcode)
    )
    assert wrong.runs == 0 and wrong.wire_bytes == 0 and not checked.ok
    assert wrong.status == ("merged" if opcode == "all-gather" else "missing")
    assert "NOT as planned: 3 present, 1 " + wrong.status in str(checked)


def test_too_few_runs_are_missed(loop) -> None:
    def fewer(text: str) -> str:
        return text.replace(
            '"known_trip_count":{"n":"3"}', '"known_trip_count":{"n":"2"}'
        )

    checked = verify_edited(loop, fewer)
    assert [c.runs for c in checked.lines if not c.ok] == [2, 2, 2]
    assert {c.status for c in checked.lines if not c.ok} == {"missing"}
    assert "2 of 3" in checked.problems()


def test_unknown_trip_counts_are_taken_from_the_plan(loop) -> None:
    def unknown(text: str) -> str:
        text = re.sub(r'"known_trip_count":\{"n":"3"\},?', "", text)
        return re.sub(r"direction=LT", "direction=NE", text)

    checked = verify_edited(loop, unknown)
    assert checked.ok and not checked.exact
    assert checked.wire_bytes == checked.planned_bytes
    assert "taken as the plan has them" in str(checked)


@pytest.mark.parametrize(
    "change, status, factor",
    [(("f32", "f64"), "widened", 2), (("f32", "bf16"), "narrowed", 0.5)],
)
def test_another_dtype_is_told(loop, change, status, factor) -> None:
    def edit(text: str) -> str:
        line = line_of(text, "reduce-scatter")
        head, equals, rest = line.partition(" = ")
        return text.replace(line, head + equals + rest.replace(*change, 1))

    checked = verify_edited(loop, edit)
    (other,) = (c for c in checked.lines if c.status != "present")
    assert (other.line.op, other.status) == ("psum_scatter", status)
    assert other.wire_bytes == other.line.total_bytes * factor
    assert checked.ok == (status == "narrowed")


def all_reduced(text: str) -> str:
    """The reduce-scatter written as an all-reduce of the whole gradient."""
    line = line_of(text, "reduce-scatter")
    shape = f"f32[{WIDTH},{WIDTH}]{{1,0}}"
    edited = re.sub(
        r"f32\[[\d,]+\]\{[\d,]+\} reduce-scatter\(", f"{shape} all-reduce(", line
    )
    return text.replace(line, re.sub(r"dimensions=\{\d\},? ?", "", edited))


@pytest.mark.parametrize("named", [True, False])
def test_a_scatter_turned_into_an_all_reduce_is_told(loop, named) -> None:
    def edit(text: str) -> str:
        text = all_reduced(text)
        return text if named else re.sub(r'op_name="[^"]*"', "", text)

    checked = verify_edited(loop, edit)
    (wrong,) = checked.having("all-reduced")
    assert wrong.line.op == "psum_scatter" and not checked.extra and not checked.ok
    assert wrong.wire_bytes == 2 * wrong.line.total_bytes
    assert "all-reduced  backward  psum_scatter->all_reduce" in checked.problems()
    assert "all-reduced: done as an all-reduce" in checked.problems()


def test_extra_collectives_are_told(loop) -> None:
    def edit(text: str) -> str:
        line = line_of(text, "all-reduce")
        twin = re.sub(
            r"%?([\w.-]+) = ", r"%twin = ", line.replace("ROOT ", ""), count=1
        )
        return text.replace(line, f"{twin}\n{line}")

    checked = verify_edited(loop, edit)
    (extra,) = checked.extra
    assert (extra.op, extra.times) == ("all_reduce", 1) and not checked.ok
    assert checked.wire_bytes == checked.planned_bytes + extra.wire_bytes
    assert (
        "extra: all_reduce of 1 float32 over 8 devices, 1 times" in checked.problems()
    )


def test_without_names_sizes_tell(loop) -> None:
    checked = verify_edited(loop, lambda t: re.sub(r'op_name="[^"]*"', "", t))
    assert checked.ok and all(c.found for c in checked.lines)


def test_a_collective_of_another_kind_is_told_by_its_name(loop) -> None:
    def edit(text: str) -> str:
        line = line_of(text, "all-gather")
        pairs = ",".join(f"{{{i},{(i + 1) % 8}}}" for i in range(8))
        other = line.replace(" all-gather(", " collective-permute(")
        added = f"source_target_pairs={{{pairs}}}, replica_groups="
        return text.replace(line, other.replace("replica_groups=", added))

    checked = verify_edited(loop, edit)
    (wrong,) = checked.having("rewritten")
    assert {c.op for c in wrong.found} == {"ppermute"} and not checked.extra


def without_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emits plans without what keeps a repeated gather apart from the first."""
    monkeypatch.setattr(interpreter, "barrier", lambda *values: values)


@pytest.mark.parametrize("name", ["cpu", aot("h100:8"), aot("tpu:v5e:2x4")])
def test_gathers_that_the_compiler_merged_are_told(name, monkeypatch) -> None:
    mesh = cpu_mesh(8) if name == "cpu" else targets.mesh(name)
    layers = [(1024, 1024)] * 4
    sharded = shard_fn(unrolled, mesh, layers, (64, 1024))
    again = [
        c.name
        for c in sharded.plan.collectives
        if (c.op, c.phase) == ("all_gather", "backward")
    ]
    assert again
    if name != "cpu" or not CPU_MERGES_GATHERS:
        checked = sharded.plan.verify(sharded.compile())
        assert checked.having("merged", "missing") == ()
    without_barriers(monkeypatch)
    fresh = shard_fn(unrolled, mesh, layers, (64, 1024))
    checked = fresh.plan.verify(fresh.compile())
    if name == "cpu" and CPU_MERGES_GATHERS:
        assert [c.line.name for c in checked.having("shared")] == again and checked.ok
        checked = fresh.plan.verify(fresh.compile().as_text())
    assert [c.line.name for c in checked.having("merged")] == again
    assert "moved once with another line" in checked.problems()


@pytest.mark.aot("h100:64")
def test_sums_that_the_gpu_concatenates_are_found() -> None:
    """Over 64 devices the bytes of a scalar on the wire are no whole number."""

    def step(state, x):
        grads = jax.grad(lambda s: jnp.mean((x @ s["w"]) * s["scale"]))(state)
        return jax.tree.map(jnp.subtract, state, grads), jnp.sum(x), jnp.sum(x**2)

    state = {"w": (512, 512), "scale": (512,)}
    sharded = shard_fn(step, targets.mesh("h100:64"), state, (64, 512), min_size=1024)
    checked = sharded.plan.verify(sharded.compile())
    assert checked.ok and checked.wire_bytes <= checked.planned_bytes
    sums = [c for c in checked.lines if c.line.op == "all_reduce"]
    assert sorted(c.line.elements for c in sums) == [1, 1, 512]
    assert all(f.combined > 1 for c in sums for f in c.found)


@pytest.mark.aot("tpu:v5p:4x4x4")
def test_over_a_whole_torus_sparse_cores_do_not_all_reduce() -> None:
    mesh = targets.mesh("tpu:v5p:4x4x4")

    def train_step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - grad, loss

    for asked, found in ((None, "present"), (False, "all-reduced")):
        options = {"compiler_options": asked}
        sharded = shard_fn(train_step, mesh, (4096, 4096), (64, 4096), **options)
        checked = sharded.plan.verify(sharded.compile())
        moved = [s[1:] for s in statuses(checked) if s[1] != "all_reduce"]
        assert moved == [("all_gather", found), ("psum_scatter", found)]
        grown = checked.wire_bytes / checked.planned_bytes
        assert (grown > 1.5) == (asked is False), grown


# The option


def arrays() -> tuple[jax.Array, jax.Array]:
    return jnp.full(STACK, 0.01, jnp.float32), jnp.ones(BATCH)


def compilations() -> list[str]:
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: (
            seen.append(event) if "backend_compile" in event else None
        )
    )
    return seen


def test_verify_runs_what_is_as_planned_and_compiles_once() -> None:
    seen = compilations()
    counts = []
    for verify in ("off", "off", "error"):  # the first compiles helpers too
        step = shardfn.fully_shard(scanned, cpu_mesh(8), min_size=8, verify=verify)
        w, x = arrays()
        state = step.shard(w)
        before = len(seen)
        state, _ = step(state, x)
        state, loss = step(state, x)
        counts.append(len(seen) - before)
        assert jnp.isfinite(loss)
    assert counts[1] == counts[2] > 0


@pytest.fixture
def widening(monkeypatch) -> None:
    """Takes the larger dtypes of CPU collectives for a fault of the program."""
    monkeypatch.setattr(compat, "promoted_dtype", lambda _, dtype: dtype)


@pytest.mark.usefixtures("widening")
def test_verify_error_refuses_and_leaves_the_state() -> None:
    step = shardfn.fully_shard(low(scanned), cpu_mesh(8), min_size=8, verify="error")
    w, x = arrays()
    state = step.shard(w)
    for _ in range(2):
        with pytest.raises(shardfn.ShardingError) as caught:
            step(state, x)
    message = str(caught.value)
    assert message.startswith(
        "the compiled cast is not as planned on cpu.\n"
        "  cast was called at test_verify.py:"
    )
    assert "widened  forward   all_gather" in message
    assert "bfloat16->float32" in message
    assert message.endswith("verify='warn' warns, and runs it as it is.")
    assert step.unshard(state).sum() == w.sum()


@pytest.mark.usefixtures("widening")
def test_verify_warns_once_per_set_of_shapes() -> None:
    step = shardfn.fully_shard(low(scanned), cpu_mesh(8), min_size=8, verify="warn")
    w, x = arrays()
    with pytest.warns(shardfn.VerificationWarning, match="It runs as it is.$"):
        state, _ = step(w, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, x)
        step(jnp.asarray(jax.device_get(state)), x)
    with pytest.warns(shardfn.VerificationWarning):
        step(arrays()[0], jnp.ones((2 * ROWS, WIDTH)))


@pytest.mark.usefixtures("widening")
def test_verify_leaves_a_step_inside_another_program_alone() -> None:
    step = shardfn.fully_shard(low(scanned), cpu_mesh(8), min_size=8, verify="error")
    _, loss = jax.jit(step)(*arrays())
    assert jnp.isfinite(loss)


def test_verify_is_a_known_word_and_needs_a_mesh() -> None:
    with pytest.raises(shardfn.ShardingError) as caught:
        shardfn.fully_shard(scanned, cpu_mesh(8), verify="yes")
    assert str(caught.value).startswith(
        "verify='yes' is none of 'off', 'warn', 'error'.\n"
        "  fully_shard was called at test_verify.py:"
    )
    with pytest.raises(shardfn.ShardingError) as caught:
        shardfn.fully_shard(scanned, verify="error")
    assert "verify='error' needs a mesh" in str(caught.value)
    assert "with plan.verify(compiled)" in str(caught.value)


def test_a_gather_of_rows_that_another_pass_repeats_is_as_planned() -> None:
    """The backward pass of a checkpoint gathers the flipped rows again, which a
    compiler that looks through barriers does not."""

    def step(w, x):
        def loss(x):
            best, _ = lax.top_k(jnp.flip(x, 0), WIDTH)
            return x.mean() + best.mean() + jnp.exp(-x * x).mean()

        value, grads = jax.value_and_grad(jax.checkpoint(loss))(x)
        return w, value + jnp.tanh(grads).mean()

    sharded = shard_fn(step, cpu_mesh(8), STACK, BATCH)
    compiled = sharded.compile(**QUICK)
    checked = sharded.plan.verify(compiled)
    found = [status for _, op, status in statuses(checked) if op == "all_gather"]
    assert len(found) == 3 and checked.ok
    shared = {"shared"} if CPU_MERGES_GATHERS else set()
    assert {*found} == {"present"} | shared


def test_a_loop_of_one_iteration_is_none() -> None:
    def step(w, x):
        def loss(w):
            h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(w)
        return w - grads, value

    sharded = shard_fn(step, cpu_mesh(8), (1, WIDTH, WIDTH), BATCH)
    checked = sharded.plan.verify(sharded.compile(**QUICK))
    assert statuses(checked) == [FORWARD, LOSS, SCATTER]


def test_keys_move_as_their_words() -> None:
    """Each is two elements of the compiled collective."""

    def step(state, x):
        keys = jax.vmap(jax.random.split)(state["keys"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(keys[:, 1])

        def loss_fn(w):
            return jnp.mean(((x + noise) @ w) ** 2)

        loss, grad = jax.value_and_grad(loss_fn)(state["w"])
        return {"keys": keys[:, 0], "w": state["w"] - grad}, loss

    state = {"keys": jax.random.split(jax.random.key(3), 24)}
    state, x = state | {"w": jnp.ones((WIDTH, WIDTH))}, jnp.ones((24, WIDTH))
    run = shardfn.fully_shard(step, cpu_mesh(8), min_size=0, stationary=False)
    plan = run.plan(state, x)
    [moved] = [line for line in plan.collectives if line.dtype == "key<fry>"]
    assert moved.elements == 2 * 24
    checked = plan.verify(run.lower(run.shard(state), x).compile())
    assert checked.ok, checked.problems()
