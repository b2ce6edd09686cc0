"""In: the public names. Out: each says what it takes and gives; its examples run."""

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module

import jax
import pages
import pytest
from messages import all_messages

import shardfn
import shardfn.analysis.targets
import shardfn.storage.checkpoint
import shardfn.storage.safetensors
import shardfn.testing

# Modules whose public names are in `__all__`.
MODULES = (
    shardfn.rules,
    shardfn.analysis,
    shardfn.analysis.targets,
    shardfn.storage.checkpoint,
    shardfn.storage.safetensors,
    shardfn.testing,
)


def public_names() -> Iterator[tuple[str, object]]:
    """Public names, as users write them: by the module that they belong to."""
    elsewhere = set()
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                elsewhere.add(id(value))
                yield f"{module.__name__}.{name}", value
    for name, value in vars(shardfn).items():
        if not name.startswith("_") and not inspect.ismodule(value):
            if id(value) not in elsewhere:
                yield f"shardfn.{name}", value


QUALIFIED = dict(public_names())
PUBLIC = {name.rpartition(".")[2]: value for name, value in QUALIFIED.items()}


# Their methods are what people call with arrays; those of rules are one line each.
STEPS = shardfn.ShardedStep, shardfn.LocalStep, shardfn.storage.checkpoint.Checkpoints


def functions() -> Iterator[tuple[str, Callable]]:
    """Public functions, and the public methods of steps."""
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            yield name, value
        members = inspect.getmembers(value, inspect.isfunction)
        for method, function in members if value in STEPS else ():
            if not method.startswith("_"):
                yield f"{name}.{method}", function


FUNCTIONS = dict(functions())


def sections(function: Callable) -> set[str]:
    lines = (inspect.getdoc(function) or "").splitlines()
    return {line[:-1] for line in lines if line.endswith(":") and line[:1].isupper()}


def test_every_public_name_is_in_all() -> None:
    """What a module without an underscore defines is public, or has one itself."""
    for module in MODULES:
        defined = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
        }
        assert defined <= set(module.__all__), module.__name__


def test_the_public_names() -> None:
    assert {"fully_shard", "ShardedStep", "Plan", "ShardingError"} <= set(PUBLIC)
    assert {"fully_shard", "ShardedStep.init", "register_rule"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_a_docstring(name: str) -> None:
    doc = PUBLIC[name].__doc__
    assert doc and not doc.startswith(f"{name}("), "dataclasses make one of their own"
    assert doc.split("\n\n")[0].rstrip().endswith((".", "`"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_say_what_they_take_and_give(name: str) -> None:
    function = FUNCTIONS[name]
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters if p != "self"]
    doc = inspect.getdoc(function)
    assert doc
    assert "Args" in sections(function) or not parameters
    assert "Returns" in sections(function)
    for parameter in parameters:
        written = [f"\n  {stars}{parameter}: " for stars in ("", "*", "**")]
        assert any(w in doc for w in written), f"{parameter} is not in Args"


@pytest.mark.parametrize("name", [n for n in PUBLIC if inspect.isclass(PUBLIC[n])])
def test_public_methods_and_properties_have_docstrings(name: str) -> None:
    for member, value in vars(PUBLIC[name]).items():
        if member.startswith("_") and member != "__call__":
            continue
        if inspect.isfunction(value) or isinstance(value, property):
            assert value.__doc__, f"{name}.{member}"


def modules_with_examples() -> list[str]:
    """Modules that define a public name and show how to use it."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = sorted({value.__module__ for value in PUBLIC.values()})
    return [n for n in names if any(t.examples for t in finder.find(import_module(n)))]


def test_fully_shard_has_an_example() -> None:
    assert "shardfn._api.fully_shard" in modules_with_examples()


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str) -> None:
    assert jax.device_count() == 8
    if name == "shardfn.analysis.targets" and (
        reason := shardfn.analysis.targets.missing("h100:8")
    ):
        pytest.skip(reason)
    failed, tried = doctest.testmod(import_module(name))
    assert tried and not failed


def test_the_api_page_has_every_public_name() -> None:
    entries = re.findall(r"^::: (\S+)$", (pages.DOCS / "api.md").read_text(), re.M)
    assert sorted(entries) == sorted(QUALIFIED)


def test_troubleshooting_has_every_message() -> None:
    """A `pytb` block there is the first line of a message."""
    text = (pages.DOCS / "troubleshooting.md").read_text()
    blocks = re.findall(r"^```pytb\n(.*?)^```$", text, re.M | re.S)
    entries = [" ".join(block.split()) for block in blocks]
    missing = {m: w for m, w in all_messages().items() if m not in entries}
    assert not missing, "add a block with this line, why it happens and what to do"
    assert sorted(entries) == sorted(all_messages()), "no message says this any more"
