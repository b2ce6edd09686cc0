"""In: a made-up repository, and real ones where IN_THE_WILD names their folders, as in
`lm1b=/somewhere/flax,wmt=/somewhere/flax`. Out: a row for each.
"""

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "in_the_wild"
REAL = dict(x.split("=") for x in os.environ.get("IN_THE_WILD", "").split(",") if x)
SOURCE = """
import jax
import jax.numpy as jnp
import tensorflow_datasets as tfds
from torchvision import transforms


class Reader(tfds.core.GeneratorBasedBuilder):
    shape: tfds.features.Tensor | None = None


@tfds.decorate(name="data")
def read(paths):
    return transforms.Compose([transforms.ToTensor()])(paths)


def train_step(state, x, *, decay):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    grad, loss = MEAN
    return {"w": decay * state["w"] - 0.1 * grad}, loss
"""
ALONE = SOURCE.replace("MEAN", "grad, loss")
MAPPED = SOURCE.replace("MEAN", 'jax.lax.pmean((grad, loss), "rows")')


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the example."""
    monkeypatch.syspath_prepend(FOLDER)
    finders = list(sys.meta_path)
    names = ("mains", "program", "programs", "sources", "trainers")
    before = {x: sys.modules.pop(x, None) for x in (*names, "train")}
    yield {x: importlib.import_module(x) for x in names}
    sys.meta_path[:] = finders
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:  # of another example
            sys.modules[name] = module
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tensorflow_datasets", "torchvision"):
            del sys.modules[name]


def make(train: Any) -> Any:
    import jax.numpy as jnp
    from program import Made

    state = {"w": jnp.arange(64.0).reshape(16, 4)}
    return Made((state, jnp.ones((16, 16))), {"decay": 0.5})


@pytest.mark.parametrize(
    "source, axis", [(ALONE, "data"), (MAPPED, "rows")], ids=["alone", "mapped"]
)
def test_a_source_gives_a_row(
    gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source, axis
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "COMMIT").write_text("0123456789\n")
    of = gallery["program"]
    bind = gallery["programs"].bind
    program = of.Program("some/body", "train.py", make, bind, axis=axis)
    assert program.lines == 1
    row = str(of.run("made_up", program, tmp_path, target=""))
    assert row.startswith(
        "| made_up | some/body@0123456 train.py | 1 | equal, 1 leaves | 0 of 0 kB | "
    )
    own = "-" if axis == "data" else "1.78 M"
    assert row.endswith(f" | {own} | not asked |")
    assert (tmp_path / "train.py").read_text() == source
    missing = dataclasses.replace(program, file="no.py")
    with pytest.raises(gallery["sources"].SourceError) as caught:
        of.run("made_up", missing, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no no.py: give the path of a checkout with it."
    )
    newer = dataclasses.replace(program, python=(9, 0))
    with pytest.raises(gallery["sources"].SourceError) as caught:
        of.run("made_up", newer, tmp_path)
    assert str(caught.value) == "train.py needs Python 9.0."


def test_adapters_are_short(gallery: Any) -> None:
    programs = gallery["programs"].PROGRAMS
    assert all(program.lines <= 6 for program in programs.values())
    assert programs["ogbg"].lines == 0 and programs["lm1b"].lines == 1
    assert programs["gemma"].lines == 0 and programs["simply"].lines == 1


def test_a_file_of_a_package_does_not_shadow_what_it_imports(
    gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "src" / "of_somebody" / "training"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "colorsys.py").write_text("raise AssertionError('not this one')")
    (folder / "trainer.py").write_text("import colorsys; made = colorsys.rgb_to_hsv")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    module = gallery["sources"].load(tmp_path, "src/of_somebody/training/trainer.py")
    assert module.__name__ == "of_somebody.training.trainer"


IN_MAIN = """
import functools

import jax
import jax.numpy as jnp


def main(batches):
    @jax.jit(static_argnums=())
    def create():
        return {"w": jnp.arange(64.0).reshape(16, 4)}

    state = create()

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad}, loss

    jax.block_until_ready(update.lower(state, batches[0]))
    for batch in batches:
        state, loss = update(state, batch)
    raise AssertionError("main went on")
"""


def test_a_step_inside_main_is_taken_at_its_first_call(
    gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax
    import jax.numpy as jnp

    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(IN_MAIN)
    sources, of = gallery["sources"], gallery["program"]

    def make(train: Any) -> Any:
        call = sources.first_call(lambda: train.main([jnp.ones((16, 16))]), "update")
        return of.Made(jax.device_get(call.args), {"step": call.function, "call": call})

    mains = gallery["mains"]
    shards = mains.as_its_main_shards
    program = of.Program("a/b", "train.py", make, mains.step_of_main, own=shards)
    row = of.run("made_up", program, tmp_path, target="")
    assert (program.lines, row.leaves, row.own) == (0, 1, 0.0)
    jit, train = jax.jit, sys.modules["train"]
    with pytest.raises(TypeError, match="not subscriptable"):
        sources.first_call(lambda: train.main(None), "update")
    with pytest.raises(sources.SourceError) as caught:
        sources.first_call(lambda: None, "update")
    assert str(caught.value) == "main calls no update of jax.jit"
    assert jax.jit is jit


@pytest.mark.skipif(not REAL, reason="IN_THE_WILD names no checkout")
@pytest.mark.parametrize("name", REAL)
def test_real_sources(gallery: Any, name: str) -> None:
    program = gallery["programs"].PROGRAMS[name]
    if sys.version_info < program.python:
        pytest.skip(f"{name} needs Python {program.python}")
    print(gallery["program"].run(name, program, Path(REAL[name])))
