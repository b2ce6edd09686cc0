"""Compile-only targets: their names, figures, devices and errors."""

import os

import jax
import jax.numpy as jnp
import pytest
from compilers import aot
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from shardfn.analysis import targets
from shardfn.analysis._hlo import read_collectives
from shardfn.analysis._latency import transfer

KNOWN = (
    "GPUs: a100, h100, h200, b200, gb200; TPUs: v5e, v5p, v6e, tpu7x.\n"
    "Examples: a100:8, h100:8, h100:64, h200:8, b200:8, tpu:v5e:2x4, "
    "tpu:v5p:4x4x4, ..."
)


@pytest.mark.parametrize(
    "name, platform, topology, count",
    [
        ("h100:8", "cuda", "1x1x8", 8),
        ("h100:4", "cuda", "1x1x4", 4),
        ("h100:64", "cuda", "8x1x8", 64),
        ("h100:4x2x8", "cuda", "4x2x8", 64),
        ("b200:2x8x4", "cuda", "2x8x4", 64),
        ("tpu:v5e:2x4", "tpu", "v5e:2x4", 8),
        ("tpu:v5p:4x4x4", "tpu", "v5p:4x4x4", 64),
        ("gb200:2", "cuda", "1x1x2", 2),
        ("gb200:64", "cuda", "1x16x4", 64),
        ("gb200:144", "cuda", "2x18x4", 144),
        ("tpu:tpu7x:2x2x1", "tpu", "tpu7x:2x2x1", 8),
    ],
)
def test_names(name, platform, topology, count):
    found = targets.target(name)
    assert (found.platform, found.topology) == (platform, topology)
    assert (found.name, found.num_devices) == (name, count)
    assert targets.target(name.upper()) == found


@pytest.mark.parametrize(
    "name, tflops, gigabytes, link",
    [
        ("a100:8", 312, 80, 300),
        ("h100:8", 989.5, 80, 450),
        ("h200:8", 989.5, 141, 450),
        ("b200:8", 2250, 180, 900),
        ("tpu:v5e:2x4", 197, 16, 200),
        ("tpu:v5p:2x2x2", 459, 102.00547328, 600),
        ("tpu:v6e:2x4", 918, 32, 400),
        ("gb200:8", 2500, 186, 900),
        ("tpu:tpu7x:2x2x1", 1153.5, 103.079215104, 300),
    ],
)
def test_figures(name, tflops, gigabytes, link):
    found = targets.target(name)
    assert (found.flops, found.link_bandwidth) == (tflops * 1e12, link * 1e9)
    assert found.memory == pytest.approx(gigabytes * 1e9)
    assert found.network_bandwidth < found.link_bandwidth < found.memory_bandwidth


@pytest.mark.parametrize(
    "name, message",
    [
        ("v100:8", f"no compile-only target is called 'v100:8'. {KNOWN}"),
        ("h100", "target 'h100' lacks the number of devices behind it.\nWrite h100:8"),
        (
            "tpu:h100",
            "target 'tpu:h100' lacks the number of devices behind it.\nWrite h",
        ),
        (
            "v5e",
            "target 'v5e' lacks the shape of a slice behind it.\nWrite tpu:v5e:2x4",
        ),
        ("h100:0", f"no compile-only target is called 'h100:0'. {KNOWN}"),
        (
            "v5e:8",
            "target 'v5e:8' has a number of TPUs, whose slices are named by their "
            "shape.\nWrite the chips along each side of the slice, as in tpu:v5e:2x4.",
        ),
        ("tpu:v5p:64", "target 'tpu:v5p:64' has a number of TPUs, whose"),
        ("tpu:h100:2x4", "target 'tpu:h100:2x4' is a GPU.\nWrite h100:8 for example."),
        ("V5P:2x2x2", "target 'v5p:2x2x2' lacks tpu:\nWrite tpu:v5p:2x2x2."),
        ("tpu:v4:2x2x1", "target 'tpu:v4:2x2x1' cannot be compiled for: the compiler"),
        ("gb200:6", "target 'gb200:6' has 6 GPUs, which do not fill hosts of 4.\n"),
        (
            "h100:12",
            "target 'h100:12' has 12 GPUs, which do not fill hosts of 8.\n"
            "Write it as <slices>x<hosts>x<GPUs per host>.",
        ),
    ],
)
def test_a_name_that_is_none(name, message):
    for use in (targets.target, targets.devices, targets.mesh, targets.missing):
        with pytest.raises(ValueError) as error:
            use(name)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "name, packages",
    [
        ("h100:8", "jax-cuda12-plugin or jax-cuda13-plugin"),
        ("tpu:v5e:2x4", "libtpu"),
    ],
)
def test_a_compiler_that_is_not_installed(name, packages, monkeypatch):
    monkeypatch.setattr(targets, "_version", lambda package: "")
    targets._devices.cache_clear()
    with pytest.raises(ImportError) as error:
        targets.devices(name)
    assert str(error.value) == targets.missing(name)
    assert str(error.value) == (
        f"compiling for '{name}' needs the package {packages}, which is not "
        "installed.\n"
        "Run pip install 'shardfn[aot]', or in a clone pip install -e '.[aot]'"
    )


@pytest.mark.parametrize(
    "name, package, needed",
    [
        ("h100:8", "jax-cuda12-plugin", jax.lib.__version__),
        ("tpu:v5e:2x4", "libtpu", "0.0.42"),
    ],
)
def test_a_compiler_of_another_jax(name, package, needed, monkeypatch):
    installed = {package: "0.0.7", "jaxlib": jax.lib.__version__}
    monkeypatch.setattr(targets, "_version", lambda name: installed.get(name, ""))
    monkeypatch.setattr(
        targets.importlib.metadata,
        "requires",
        lambda name: ["numpy>=2.0", 'libtpu==0.0.42.*; extra == "tpu"'],
    )
    targets._devices.cache_clear()
    with pytest.raises(RuntimeError) as error:
        targets.devices(name)
    assert str(error.value) == (
        f"{package} 0.0.7 does not belong to jax {jax.__version__}, which needs "
        f"{needed}: it may misread the programs of this one.\n"
        f"Run pip install 'shardfn[aot]' 'jax=={jax.__version__}', or in a clone "
        f"pip install -e '.[aot]' 'jax=={jax.__version__}'"
    )
    installed[package] = f"{needed}.1"
    targets._check_version(targets.target(name).platform)


def test_jax_says_which_libtpu_it_needs():
    assert targets._needed_libtpu().startswith("0.0.")


@pytest.mark.parametrize(
    "name, kind, op",
    [
        aot("a100:8", "NVIDIA A100-SXM4-80GB", "all_gather"),
        aot("h100:8", "NVIDIA H100 80GB HBM3", "all_gather"),
        aot("h100:8x1x8", "NVIDIA H100 80GB HBM3", "all_gather"),
        aot("h200:8", "NVIDIA H200 141GB HBM3e", "all_gather"),
        aot("b200:8", "NVIDIA B200", "all_gather"),
        aot("gb200:1x2x4", "NVIDIA GB200", "all_gather"),
        aot("tpu:v5e:2x4", "TPU v5 lite", "all_gather"),
        # Over 64 chips the TPU compiler writes the shard into zeros and all-reduces.
        aot("tpu:v5p:4x4x4", "TPU v5", "all_reduce"),
        aot("tpu:v6e:2x4", "TPU v6 lite", "all_gather"),
        aot("tpu:tpu7x:2x2x1", "TPU7x", "all_gather"),
    ],
)
def test_programs_compile_for_each_target(name, kind, op):
    mesh = targets.mesh(name)
    count = targets.target(name).num_devices
    assert (mesh.axis_names, mesh.axis_types) == (("data",), (AxisType.Auto,))
    assert mesh.size == len(targets.devices(name)) == count
    assert {d.device_kind for d in mesh.devices.flat} == {kind}
    rows = jax.ShapeDtypeStruct(
        (count * 128, 256), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def step(x):
        return jnp.sin(lax.all_gather(x, "data", tiled=True))

    (found,) = read_collectives(step.lower(rows).compile().as_text())
    assert (found.op, found.elements) == (op, count * 128 * 256)
    assert found.groups == (tuple(range(count)),)


@pytest.mark.parametrize("name", [aot("h100:8"), aot("tpu:v5e:2x4")])
def test_a_mesh_of_two_axes(name):
    mesh = targets.mesh(name, ("replica", "data"), (2, 4))
    assert dict(mesh.shape) == {"replica": 2, "data": 4}
    assert mesh == targets.mesh(name, ("replica", "data"), (2, 4))
    assert set(mesh.devices.flat) == set(targets.devices(name))


@pytest.mark.parametrize(
    "axes, shape", [(("replica", "data"), (2, 3)), (("replica", "data"), (8,))]
)
def test_a_mesh_that_leaves_devices_over(axes, shape):
    with pytest.raises(ValueError) as error:
        targets.mesh("h100:8", axes, shape)
    assert str(error.value) == (
        f"target 'h100:8' has 8 devices, which do not form a mesh of shape {shape} "
        f"with axes {axes}.\nPass one size per axis, as shape= of mesh, or mesh_shape= "
        "of step.on and tune."
    )


@pytest.mark.parametrize("name", [aot("tpu:v5e:3x5")])
def test_a_topology_that_the_compiler_refuses(name):
    with pytest.raises(
        ValueError, match="^the compiler refuses target 'tpu:v5e:3x5': "
    ):
        targets.devices(name)


@pytest.mark.parametrize("name", [aot("tpu:v5e:2x2")])
def test_the_environment_keeps_what_the_user_set(name, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "true")
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    monkeypatch.setattr(targets.glob, "glob", lambda pattern: [])
    targets._devices.cache_clear()
    assert len(targets.devices(name)) == 4
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "true"
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_links_that_connect_hosts():
    """A ring over two hosts of a GB200's rack uses NVLink, over racks the network."""
    gb200, b200 = targets.target("gb200:144"), targets.target("b200:16")
    one, two = [(0, 0, 0), (0, 1, 0)], [(0, 0, 0), (1, 0, 0)]
    cases = (gb200, one, 900e9), (gb200, two, 50e9), (b200, two, 50e9)
    for machine, coords, rate in cases:
        assert transfer(machine, "all_gather", 60 * rate, coords).links == 60
