"""In: the table of options that may differ from leaf to leaf. Out: all that shows or
takes an option is made of its row.
"""

import ast
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardfn
from shardfn._api.options import Options
from shardfn._core.control import LeafControl, make_control
from shardfn._core.leaf_options import LEAF_OPTIONS

PACKAGE = Path(shardfn.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"

ROW = '''
    thickness: Annotated[
        PerLeaf[int],
        Option(
            default=0,
            values=COUNT,
            read_by=("_schedule.bucket",),
            doc="""How thick a leaf is: new here. It has a second sentence.""",
        ),
    ]
'''

SHOW = """
import inspect, sys
sys.path.insert(0, sys.argv[1])
import leaf_options
import shardfn
from shardfn._api.cli import main
from shardfn._core.control import make_control

print(inspect.signature(shardfn.fully_shard).parameters["thickness"])
print(shardfn.fully_shard.__doc__)
print(make_control(thickness={"a/*": 3}).of("a/b").thickness)
print(make_control(thickness=2))
print(leaf_options.table(), leaf_options.annotations()["thickness"])
for wrong in ({"thickness": -1}, {"thicknes": 1}):
    try:
        shardfn.fully_shard(lambda w, x: (w, x), **wrong)
    except shardfn.ShardingError as error:
        print(error)
main(["plan", "--help"])
"""


def test_a_row_is_all_that_an_option_takes(tmp_path) -> None:
    """A row more in a copy of the package: the signature, the docstring, the control,
    the messages, the docs' table and the command line have it."""
    pytest.importorskip("griffe")
    copy = tmp_path / "shardfn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "_core" / "leaf_options.py"
    before = "\n\ndef _options()"
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, ROW + before))
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(DOCS)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        "thickness: Union[int, collections.abc.Mapping[str, int]] = 0\n",
        "  thickness: How thick a leaf is: new here. It has a second sentence.\n",
        "\n3\nthickness: 2\n",
        "| `thickness` | an integer that is not negative | `0` | `_schedule.bucket` |",
        "PerLeaf[int]\n",
        "thickness cannot be -1.\n",
        "fully_shard has no option 'thicknes'.\n",
        "Did you mean thickness=...?",
        "--thickness [VALUE|PATTERN=VALUE ...]",
        "How thick a leaf is: an integer that is not negative. (default: as the",
    ):
        assert shown in done.stdout, (shown, done.stdout)


def test_every_option_is_a_parameter_with_its_default() -> None:
    parameters = inspect.signature(shardfn.fully_shard).parameters
    for name, option in LEAF_OPTIONS.items():
        assert parameters[name].default == option.default_given
        assert getattr(LeafControl(), name) == option.default
        # As users write it, the default is allowed, and asks for nothing.
        assert not make_control(**{name: option.default_given}).choices
    assert {*parameters} == {"train_step", "mesh", *Options.__annotations__}


@pytest.mark.parametrize("name", LEAF_OPTIONS)
def test_the_named_modules_read_the_option(name: str) -> None:
    for module in LEAF_OPTIONS[name].read_by:
        tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
        read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert name in read, f"{module} does not read {name}"
    readers = LEAF_OPTIONS[name].read_by
    assert readers and len(set(readers)) == len(readers)


def test_options_that_are_given_make_the_same_control() -> None:
    control = make_control(
        shard={"a": "data", "*": False},
        prefetch=2,
        gather_dtype={"b/*": "bfloat16"},
        per_device_state=("c/*",),
    )
    assert make_control(**control.given) == control
