"""In: the text of the package. Out: imports go one way, and JAX's versions and private
modules are known in one place.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardfn

ROOT = Path(shardfn.__file__).parent

# Each module imports only from those above it.
ORDER = """
    _compat
    _errors
    _processes
    _compiler_options
    _control
    _sharding
    _auto
    _constrain
    _rule
    _rules._names _rules.elementwise _rules.shape _rules.windows
    _rules.cast _rules.contraction _rules.indexing _rules.linalg _rules.random
    _rules.reduction _rules.reshape _rules.sorting
    _rules
    _padding
    _uneven_batch
    _arguments
    _partition
    _meshes
    _storage
    _per_device
    _trace
    _counting
    _looks
    _program
    _phase
    _leaves
    _fold
    _reshard
    _hlo.parse _hlo.groups _hlo.collective _hlo.loops _hlo.collectives
    _hlo
    _hlo.cost _hlo.live _hlo.timeline _flops
    _gpus targets
    _plan
    _plan_table
    _verification
    _verify
    _want
    _decide
    _carry
    _rows
    _control_flow
    _review
    _split_again
    _settle
    _steps
    _propagate
    _auto_plan
    _wire
    _widen
    _schedule._origin
    _schedule._bodies
    _schedule._bucket
    _schedule._hoist _schedule._keep _schedule._order _schedule._pace
    _schedule._hold _schedule._prefetch _schedule._share
    _schedule
    _fingerprint
    _describe
    _collectives
    _barrier
    _custom
    _extreme
    _scan_ahead
    _emit_op
    _emit_move
    _emit
    _planner
    _mentions _named
    _plain_step
    _ready
    _on_mesh
    _programs
    _report
    _compile_for
    _page
    _init
    _sharded_step
    _local_step
    _options
    _fully_shard
    __init__
    _cli
    __main__
    _compare _rounding testing
    _pieces _uneven _orbax _watched _on_disk checkpoint
    export
""".split()

# Plans and reports print themselves with modules that read them: imported for that.
LATE = {
    ("_plan", "_plan_table"),
    ("_plan", "_verify"),
    ("_plan", "_verification"),
    ("_report", "_page"),
}

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = {
    name.removesuffix(".__init__"): ast.parse(path.read_text(), str(path))
    for name, path in FILES.items()
}


def imported(name: str) -> Iterator[str]:
    """Modules of the package that module `name` imports, inside functions too."""
    package = name if FILES.get(f"{name}.__init__") else name.rpartition(".")[0]
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["shardfn", *package.split(".")] if package else ["shardfn"]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            # `from shardfn import _compat` imports a module, `... import Axes` a name.
            found = [f"{base}.{alias.name}" for alias in node.names]
            found = [f if module_of(f) in MODULES else base for f in found]
        else:
            continue
        for module in found:
            if module.split(".")[0] == "shardfn":
                yield module_of(module)


def module_of(dotted: str) -> str:
    return dotted.removeprefix("shardfn").removeprefix(".") or "__init__"


def test_every_module_has_its_place() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert set(ORDER) - set(MODULES) == set(), "listed, but not there"
    assert set(MODULES) - set(ORDER) == set(), "give new modules a place in ORDER"


def test_imports_go_one_way() -> None:
    wrong = [
        f"{name} imports {other}"
        for i, name in enumerate(ORDER)
        for other in imported(name)
        if other not in ORDER[:i] and (name, other) not in LATE
    ]
    assert wrong == []


def test_imports_are_found() -> None:
    """Guards the two tests above: all three ways to write an import are read."""
    assert "_compat" in imported("_partition"), "from shardfn import _compat"
    assert "_sharding" in imported("_partition"), "from shardfn._sharding import ..."
    assert "_gpus" in imported("targets"), "from ._gpus import ..."
    assert "_schedule._share" in imported("_schedule")
    assert "_plan_table" in imported("_plan"), "inside a function"


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
    assert found.pop("_compat"), f"{find.__name__} finds what is there"
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_importing_the_package_makes_no_device() -> None:
    """`jax.config.update("jax_num_cpu_devices", 8)` still works after the import."""
    import subprocess

    code = (
        "import shardfn, jax; jax.config.update('jax_num_cpu_devices', 3);"
        "assert jax.device_count() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)
