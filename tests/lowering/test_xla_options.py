"""What compilers are told: probed by name, never over the user, and only at the top."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from jax.sharding import AxisType

import shardfn
from shardfn._lowering import xla_options
from shardfn._lowering.option_table import TRIED, CompilerOption
from shardfn._lowering.xla_options import (
    compiler_options,
    needed_options,
    refusal,
    set_elsewhere,
    tried,
)
from shardfn.analysis import targets
from shardfn.analysis._hlo.parse import has_matmul, parse_module

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
HIDING = ("xla_gpu_enable_latency_hiding_scheduler", True)
MERGED = ("xla_gpu_dot_merger_threshold_mb", 32)
STEP = {"min_size": 0, "donate": False}


def cpus() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.sum(x)


def machines(
    hosts: int = 2, kind: str = "GPU", processes: int = 1
) -> list[SimpleNamespace]:
    """One device for each of the processes of each host, which is a slice."""
    platform = "gpu" if kind == "GPU" else "tpu"
    own = {"platform": platform, "device_kind": kind}
    return [
        SimpleNamespace(
            process_index=i, coords=(i // processes, i % processes, 0), **own
        )
        for i in range(hosts * processes)
    ]


@pytest.fixture(autouse=True)
def no_flags(monkeypatch) -> None:
    """Nothing is set outside, as far as this package sees."""
    monkeypatch.delenv("XLA_FLAGS")


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that knows some names, in place of the installed ones."""

    def make(known: dict[str, object], table: tuple[CompilerOption, ...]):
        def refusal(device, options) -> str:
            for name, value in options:
                if known.get(name) != value:
                    return f"No such compile option: '{name}'"
            return ""

        monkeypatch.setattr(xla_options, "refusal", refusal)
        monkeypatch.setattr(xla_options, "OPTIONS", table)

    return make


NEW, OLD = ("xla_new", "ON"), ("xla_old", True)
TABLE = (
    CompilerOption("gpu", (NEW, OLD)),
    CompilerOption(
        "gpu", (("xla_far", 2),), decided_by=("optimization_level",), slices=True
    ),
    CompilerOption("tpu", (("xla_tpu", "true"),)),
    CompilerOption(
        "tpu", (("xla_sc", "1"),), decided_by=("xla_fuse",), kinds=("TPU v5",)
    ),
)


@pytest.mark.parametrize(
    "known, hosts, expected",
    [
        (("xla_new", "xla_old", "xla_far"), 1, {"xla_new": "ON"}),
        (("xla_new", "xla_far"), 2, {"xla_new": "ON", "xla_far": 2}),
        (("xla_old", "xla_far"), 1, {"xla_old": True}),
        ((), 2, {}),
    ],
)
def test_the_first_spelling_that_the_compiler_knows(compiler, known, hosts, expected):
    values = {"xla_new": "ON", "xla_old": True, "xla_far": 2}
    compiler({name: values[name] for name in known}, TABLE)
    assert compiler_options(machines(hosts), None) == expected


def test_a_refusal_that_names_no_option(monkeypatch) -> None:
    """Those that the compiler takes are set, as results may depend on them. Where it
    takes none, the step's compilation says why."""
    refused = {"xla_new"}

    def refusal(device, options) -> str:
        return "Bad value." * (not refused.isdisjoint(dict(options)))

    monkeypatch.setattr(xla_options, "refusal", refusal)
    monkeypatch.setattr(xla_options, "OPTIONS", TABLE)
    found = compiler_options(machines(2), None)
    assert found == {"xla_old": True, "xla_far": 2}
    refused |= {"xla_old", "xla_far"}
    assert compiler_options(machines(2), None) == {}


def test_processes_of_one_host_are_no_hosts(compiler):
    """NVLink connects what one process each runs, as slurm starts them."""
    compiler({"xla_new": "ON", "xla_far": 2}, TABLE)
    assert compiler_options(machines(1, processes=8), None) == {"xla_new": "ON"}
    found = compiler_options(machines(2, processes=8), None)
    assert found == {"xla_new": "ON", "xla_far": 2}


def test_options_of_some_kinds_of_tpu(compiler):
    compiler({"xla_tpu": "true", "xla_sc": "1", "xla_fuse": "true"}, TABLE)

    def options(kind: str, **asked: str):
        return compiler_options(machines(kind=kind), asked)

    assert options("TPU v5") == {"xla_tpu": "true", "xla_sc": "1"}
    assert options("TPU v5 lite") == {"xla_tpu": "true"}
    fused = {"xla_tpu": "true", "xla_fuse": "true"}
    assert options("TPU v5", xla_fuse="true") == fused


def test_options_of_no_more_than_so_many_devices(compiler):
    option = CompilerOption("tpu", (("wide", "true"),), most=2)
    compiler({"wide": "true"}, (option,))
    assert compiler_options(machines(2, "TPU v5p"), None) == {"wide": "true"}
    assert compiler_options(machines(3, "TPU v5p"), None) == {}


def test_options_for_quantized_gathers(compiler):
    compiler(
        {"bits": True}, (CompilerOption("gpu", (("bits", True),), quantized=True),)
    )
    assert compiler_options(machines(), None, quantizes=True) == {"bits": True}
    assert compiler_options(machines(), None) == {}


LIST = ("passes", "ours")


@pytest.mark.parametrize(
    "asked, flags, expected",
    [
        ({}, "", "ours"),
        ({"passes": "mine"}, "", "mine,ours"),
        ({}, "--passes=mine --a=1", "mine,ours"),
        ({"passes": "one,two"}, "--passes=other", "one,two,ours"),
        ({"passes": None}, "--passes=mine", None),
        ({}, "--passes='mine,ours' --a=1", "mine,ours"),
        ({}, "--others_only=x", None),
    ],
)
def test_what_results_depend_on_is_put_behind_the_users_list(
    monkeypatch, asked, flags, expected
):
    options = CompilerOption(
        "gpu", (LIST,), decided_by=("others_only",), on_host=True, is_list=True
    )
    monkeypatch.setattr(xla_options, "OPTIONS", (options,))
    monkeypatch.setattr(xla_options, "refusal", lambda device, options: "")
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = compiler_options(machines(), asked, on_host=True)
    assert found == ({"passes": expected} if expected else {})
    of_user = {name: value for name, value in asked.items() if value}
    assert compiler_options(machines(), asked) == of_user
    assert compiler_options(machines(), False, on_host=True) == {}
    # Another program has the environment's flags, and no options of this step.
    is_there = expected is None or "ours" in flags
    assert needed_options(found) == ({} if is_there else {"passes": expected})


def test_the_user_comes_first(compiler, monkeypatch, tmp_path):
    compiler({"xla_new": "ON", "xla_old": 7, "xla_far": 2, "mine": 1}, TABLE)
    ours = {"xla_new": "ON", "xla_far": 2}

    def options(asked=None):
        return compiler_options(machines(), asked)

    assert options() == ours
    assert options({"mine": 1}) == {**ours, "mine": 1}
    assert options({"xla_new": None}) == {"xla_far": 2}
    # Another spelling of what this package would say is the user's word on it.
    assert options({"xla_old": 7}) == {"xla_far": 2, "xla_old": 7}
    assert options(False) == {}
    with pytest.raises(shardfn.ShardingError) as error:
        options({"xla_far": 3})
    assert (
        "compiler_options names an option or a value that the compiler of GPU does not "
        "know: No such compile option: 'xla_far'.\n"
    ) in str(error.value)
    for flags in ("--xla_new=OFF", "--a=1 --noxla_old", str(tmp_path / "flags")):
        (tmp_path / "flags").write_text("--xla_new=OFF\n")
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert options() == {"xla_far": 2}
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_far=1")
    assert options() == {"xla_new": "ON"}
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert options() == ours


def test_settings_of_jax_settle_options(compiler):
    compiler({"xla_new": "ON", "xla_far": 2}, TABLE)
    before = jax.config.values["jax_optimization_level"]
    assert set_elsewhere() == set()
    jax.config.update("jax_optimization_level", "O1")
    try:
        assert set_elsewhere() == {"optimization_level"}
        assert compiler_options(machines(), None) == {"xla_new": "ON"}
    finally:
        jax.config.update("jax_optimization_level", before)


def test_cpus_are_told_what_the_user_says():
    assert shardfn.fully_shard(train_step, cpus()).compiler_options == {}
    asked = {"xla_cpu_enable_fast_math": False}
    step = shardfn.fully_shard(train_step, cpus(), compiler_options=asked, **STEP)
    assert step.compiler_options == asked
    w, x = jnp.eye(16), jnp.ones((8, 16))
    plain, _ = train_step(w, x)
    assert jnp.allclose(step(w, x)[0], plain, rtol=1e-6)
    # Inside another program they do not count, and calls outside find theirs again.
    nested = jax.jit(lambda x: step(w, x)[0])
    assert jnp.allclose(nested(x), plain, rtol=1e-6)
    assert jnp.allclose(step(w, x)[0], plain, rtol=1e-6)
    assert jnp.allclose(jax.vmap(lambda x: step(w, x)[0])(x[None])[0], plain)
    unknown = shardfn.fully_shard(train_step, cpus(), compiler_options={"xla_no": 1})
    with pytest.raises(shardfn.ShardingError) as error:
        unknown(w, x)
    message = str(error.value)
    assert "the compiler of cpu does not know: No such compile option: 'xla_no'" in (
        message
    )
    assert "train_step was called at test_xla_options.py:" in message


def test_only_a_refusal_is_one(monkeypatch):
    """A compiler without memory knows its options: it is asked again."""
    real, troubles = jax.stages.Lowered.compile, ["RESOURCE_EXHAUSTED: Out of memory"]

    def compile_(lowered, compiler_options=None):
        if troubles:
            raise jax.errors.JaxRuntimeError(troubles.pop())
        return real(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    asked = (("xla_cpu_enable_fast_math", False), ("xla_backend_extra_options", ""))
    with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE_EXHAUSTED: Out"):
        refusal(jax.devices()[0], asked)
    assert refusal(jax.devices()[0], asked) == ""
    no_bool = refusal(jax.devices()[0], (("xla_cpu_enable_fast_math", "x"),))
    assert no_bool.endswith("'x' is not a valid bool value")


@pytest.mark.parametrize("asked", [True, "O2", {1: 2}, {"xla_x": [1]}])
def test_what_cannot_be_asked(asked):
    with pytest.raises(shardfn.ShardingError) as error:
        shardfn.fully_shard(train_step, cpus(), compiler_options=asked)
    assert str(error.value).startswith(f"compiler_options cannot be {asked!r}.\n")
    with pytest.raises(shardfn.ShardingError) as error:
        shardfn.fully_shard(train_step, compiler_options={"xla_x": 1})
    assert "compiler_options={'xla_x': 1} needs a mesh: without one" in str(error.value)


@pytest.mark.aot("h100:8")
def test_the_report_shows_what_the_compiler_was_told(monkeypatch):
    args = jax.ShapeDtypeStruct((256, 64), "float32"), jnp.ones((16, 256))
    step = shardfn.fully_shard(train_step, cpus(), min_size=0)
    assert step.on("h100:8", *args).compiler_options == (HIDING, MERGED)
    report = step.on("h100:16", *args)
    assert report.compiler_options == (HIDING, (LIMIT, 5), MERGED)
    assert f"\n  compiler option {LIMIT}=5\n" in str(report)
    monkeypatch.setenv("XLA_FLAGS", f"--{LIMIT}=1")
    assert step.on("h100:16", *args).compiler_options == (HIDING, MERGED)


@pytest.mark.aot("h100:8")
@pytest.mark.parametrize("merged", [False, True])
def test_products_of_one_operand_stay_apart_if_they_are_large(merged) -> None:
    """Each reads rows of 32 MiB, and reads and writes 64 MiB besides. JAX 0.12 would
    make one product of two by itself; with JAX 0.10 the rows count, too."""

    def two(state, x):
        def loss_fn(state):
            a, b = (jnp.tanh(x @ state[n]) for n in "ab")
            return jnp.sum(a * b, dtype=jnp.float32)

        grads = jax.grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - g, state, grads)

    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((8 * 4096, 4096), jnp.bfloat16)
    options = {MERGED[0]: 96} if merged else None
    step = shardfn.fully_shard(two, targets.mesh("h100:8"), compiler_options=options)
    compiled = step.lower({"a": weight, "b": weight}, x).compile()
    module = parse_module(compiled.as_text())
    products = [i for i in module.entry.instructions.values() if has_matmul(i, module)]
    assert len(products) == (2 if merged else 4)


def test_numbers_and_flags_are_not_the_same_to_a_compiler():
    """What it says of `True` is not said of 1, which Python takes for the same."""
    device = jax.devices()[0]
    assert refusal(device, (("xla_embed_ir_in_executable", True),)) == ""
    number = refusal(device, (("xla_embed_ir_in_executable", 1),))
    assert "'1' is not a valid bool value" in number
    assert refusal(device, (("xla_embed_ir_in_executable", True),)) == ""


TPU = "tpu:v5p:2x2x2"


@pytest.mark.parametrize(
    "target, names",
    [
        aot(
            "h100:8",
            {
                "gathers pipelined by XLA",
                "sums not delayed by XLA",
                "eight transfers in flight",
                "one latency per operation",
            },
        ),
        aot(TPU, {"gathers pipelined over ICI", "layer scheduler"}),
    ],
)
def test_what_tuning_tries_is_known_to_the_compiler(target, names) -> None:
    given = {name: tried(targets.devices(target), name) for name in TRIED}
    assert {name for name, options in given.items() if options} == names
    for name in names:
        assert len(given[name]) == len(TRIED[name])
