"""In: the public names. Out: each says what it takes and gives; its examples run."""

import doctest
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module

import jax
import pytest

import shardfn

PUBLIC = {
    name: value
    for name, value in vars(shardfn).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}


# Their methods are what people call with arrays; those of rules are one line each.
STEPS = shardfn.ShardedStep, shardfn.LocalStep


def functions() -> Iterator[tuple[str, Callable]]:
    """Public functions, and the public methods of steps."""
    for name, value in PUBLIC.items():
        if inspect.isfunction(value):
            yield name, value
        for method, function in vars(value).items() if value in STEPS else ():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


FUNCTIONS = dict(functions())


def sections(function: Callable) -> set[str]:
    lines = (inspect.getdoc(function) or "").splitlines()
    return {line[:-1] for line in lines if line.endswith(":") and line[:1].isupper()}


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
    assert "Args" in sections(function)
    assert "Returns" in sections(function)
    for parameter in parameters:
        written = f"\n  {parameter}: ", f"\n  *{parameter}: "
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
    assert "shardfn._fully_shard" in modules_with_examples()


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str) -> None:
    assert jax.device_count() == 8
    failed, tried = doctest.testmod(import_module(name))
    assert tried and not failed
