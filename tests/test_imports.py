"""In: the text of the package. Out: packages import one way, and JAX's versions and
private modules are known in one place.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import shardfn

ROOT = Path(shardfn.__file__).parent

ORDER = (
    ("_core",),
    ("rules", "_trace", "_propagation", "_schedule", "storage", "analysis"),
    ("_lowering",),
    ("_api",),
    ("testing",),
)
"""The packages, in floors: each imports only from floors above its own. The root's own
files, `__init__` and `__main__`, import from all."""

ENTRIES = 13
"""What a look into the package's folder shows at most."""

MOST_LINES = 320
"""Of a file: a longer one is two things, each of which a stranger looks for by name."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = {
    name.removesuffix(".__init__"): ast.parse(path.read_text(), str(path))
    for name, path in FILES.items()
}


def imported(name: str) -> Iterator[str]:
    """Modules of the package that module `name` imports."""
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: write the package's name"
            base = node.module or ""
            # `from shardfn._core import compat` imports a module, `... import Axes` a
            # name.
            found = [f"{base}.{alias.name}" for alias in node.names]
            found = [f if module_of(f) in MODULES else base for f in found]
        else:
            continue
        for module in found:
            if module.split(".")[0] == "shardfn":
                yield module_of(module)


def module_of(dotted: str) -> str:
    return dotted.removeprefix("shardfn").removeprefix(".") or "__init__"


def package_of(module: str) -> str:
    return module.split(".")[0]


def floor_of(package: str) -> int:
    return next(i for i, floor in enumerate(ORDER) if package in floor)


def test_the_folder_shows_the_pipeline() -> None:
    shown = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    packages = {name for floor in ORDER for name in floor}
    assert {name for name in shown if (ROOT / name).is_dir()} == packages
    assert len(shown) <= ENTRIES


def test_files_are_short() -> None:
    counts = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: n for name, n in counts.items() if n > MOST_LINES} == {}


def test_packages_import_only_from_floors_above() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in MODULES
        if "." in name or (ROOT / name).is_dir()
        for other in imported(name)
        if package_of(name) != package_of(other)
        and floor_of(package_of(other)) >= floor_of(package_of(name))
    ]
    assert wrong == []


def test_no_circle_within_a_package() -> None:
    graph = {
        name: {other for other in imported(name) if other != package_of(name)}
        for name in MODULES
    }
    list(TopologicalSorter(graph).static_order())  # raises CycleError, with the circle


def test_nothing_is_imported_inside_a_function() -> None:
    """Such an import hides an arrow; only what an extra brings may be imported late."""
    late = [
        f"{name}:{node.lineno}"
        for name, tree in MODULES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "shardfn" in ast.unparse(node)
    ]
    assert late == []


@pytest.mark.parametrize("package", [name for floor in ORDER for name in floor])
def test_every_package_says_what_goes_in_and_out(package: str) -> None:
    text = ast.get_docstring(MODULES[package]) or ""
    assert "In: " in text and "Out: " in text and "mports" in text


def test_imports_are_found() -> None:
    """Guards the tests above: both ways to write an import are read."""
    assert "_core.compat" in imported("storage._layout"), (
        "from shardfn._core import ..."
    )
    assert "_core.sharding" in imported("storage._layout"), "... import Axes"
    assert "analysis._gpus" in imported("analysis.targets")


OPTIONAL = ("flax", "optax", "chex", "equinox", "haiku")
"""What programs are written with, and no program has to be."""


def test_only_one_module_knows_of_libraries_that_may_be_missing() -> None:
    """It imports nothing either: who has an object of a library has imported it."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
        if module.split(".")[0] in OPTIONAL
    ]
    assert found == []
    asked = [name for name, text in FILES.items() if "sys.modules" in text.read_text()]
    assert set(asked) == {"_core.optional", "_api.load_step"}, (
        "the user's own, for the latter"
    )


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LIBRARIES:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Missing())

import tempfile

import jax
import jax.numpy as jnp

import shardfn
from shardfn.storage.checkpoint import Checkpoints
from shardfn.testing import assert_parity

jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("data",))

def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss

step = shardfn.fully_shard(train_step, mesh, min_size=0)
w, x = step.init(lambda: jnp.eye(4)), jnp.ones((4, 4))
losses = []
for _ in range(2):
    w, loss = step(w, x)
    losses.append(float(loss))
assert losses[1] < losses[0]
assert "all_gather" in str(step.plan(w, x))
assert_parity(train_step, mesh, jnp.eye(4), x)
with tempfile.TemporaryDirectory() as directory:
    with Checkpoints(directory, step) as checkpoints:
        checkpoints.save(2, w)
        checkpoints.wait()
        restored = checkpoints.restore(jax.eval_shape(lambda: jnp.eye(4)))
assert (step.unshard(restored) == step.unshard(w)).all()
assert not set(LIBRARIES) & {name.split(".")[0] for name in sys.modules}
"""


def test_a_step_trains_without_libraries_that_it_does_not_use() -> None:
    import subprocess

    code = f"LIBRARIES = {OPTIONAL}\n{WITHOUT}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def private_jax(tree: ast.Module) -> Iterator[int]:
    """Lines that name a private module of JAX."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if " " not in node.value else []
        if any(f"{n}.".startswith(("jax._src.", "jaxlib._")) for n in names):
            yield node.lineno


def version_branches(tree: ast.Module) -> Iterator[int]:
    """Lines that compare JAX's version, or ask whether JAX has something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__version_info__":
            yield node.lineno
        asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if asks and node.func.id == "hasattr":  # pyright: ignore
            root = ast.unparse(node.args[0]).split(".")[0]  # pyright: ignore
            if root in ("jax", "lax", "jnp"):
                yield node.lineno


@pytest.mark.parametrize("find", [private_jax, version_branches])
def test_only_compat_knows_jax_versions_and_private_modules(find) -> None:
    found = {name: list(find(tree)) for name, tree in MODULES.items()}
    compat = [name for name in found if f"{name}.".startswith("_core.compat.")]
    known = [line for name in compat for line in found.pop(name)]
    assert known, f"{find.__name__} finds what is there"
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_importing_the_package_makes_no_device() -> None:
    """`jax.config.update("jax_num_cpu_devices", 8)` still works after the import."""
    import subprocess

    code = (
        "import shardfn, jax; jax.config.update('jax_num_cpu_devices', 3);"
        "assert jax.device_count() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_a_jaxpr_is_planned_in_one_place() -> None:
    """Trace, propagation and schedule are put together once."""
    stages = {"_propagation.propagate", "_schedule.pipeline"}
    users = {name for name in MODULES if stages & set(imported(name))}
    assert users == {"_lowering.plan_jaxpr"}
