"""In: command lines, typed in-process. Out: reports, pages, and one message each for
what cannot be run.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardfn
from shardfn._api import cli
from shardfn._api.cli import main
from shardfn._api.options import Options
from shardfn._core import errors
from shardfn.analysis import targets

ROOT = Path(__file__).parents[2]
H100 = "h100:8"

MODULE = """
import jax, jax.numpy as jnp, shardfn

def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, loss

ARGS = jax.ShapeDtypeStruct((256, 256), jnp.float32), jnp.ones((1024, 256))
mesh = jax.make_mesh((8,), ("data",))
sharded = shardfn.fully_shard(train_step, mesh, min_size=8)

def planned():
    return sharded, *ARGS

def plain():
    return train_step, *ARGS

def local():
    return shardfn.fully_shard(train_step, axis=("replica", "data")), *ARGS

def noisy(w, x):
    jax.debug.print("{}", x.sum())
    return train_step(w, x)

def prints():
    return noisy, *ARGS

def nothing():
    return 3

def needy(size):
    return planned()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "my_training.py"
    path.write_text(MODULE)
    yield str(path)
    sys.modules.pop("my_training", None)


def test_a_file_replaces_nothing_of_pythons_own(tmp_path, monkeypatch, capsys) -> None:
    """A step in `json.py`, beside a `wave.py` that Python has too: neither hides
    Python's, and a file of a name that nobody has is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    (tmp_path / "wave.py").write_text("raise SystemExit('this is not the library')")
    (tmp_path / "my_sizes.py").write_text("WIDTH = 64")
    (tmp_path / "json.py").write_text(f"import my_sizes, wave\n{MODULE}")
    before = sys.modules["json"]
    main(["plan", "json.py:planned"])
    assert "psum_scatter" in capsys.readouterr().out
    assert sys.modules["json"] is before and json.loads("[1]") == [1]
    assert sys.modules.pop("step_in_json").__file__ == str(tmp_path / "json.py")
    places = [os.path.realpath(p) for p in sys.path]
    library = places.index(os.path.realpath(sysconfig.get_path("stdlib")))
    assert places.index(os.path.realpath(tmp_path)) > library
    sys.modules.pop("my_sizes")


def refused(*argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    return str(caught.value)


def pages_of(page: str) -> list[dict]:
    """What each report of a page shows; the page asks nothing of the network."""
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    (text,) = re.findall(r"^const pages = (.*);$", page, re.MULTILINE)
    return json.loads(text)


def first_of(page: str) -> dict:
    """What the only report of a page shows."""
    (data,) = pages_of(page)
    return data


def drawn(page: Path) -> str:
    """The body of a page, as a browser has made it; its script ran to its end: the last
    thing that it fills is the footer."""
    browser = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom")
    done = subprocess.run(
        [*browser, page.as_uri()], capture_output=True, text=True, timeout=120
    )
    body = done.stdout.partition("<body")[2]
    assert "data sheets" in body.partition("<footer")[2].partition("</footer>")[0]
    return body


def test_without_a_target_the_plan_is_printed(file, capsys) -> None:
    main(["plan", f"{file}:planned"])
    assert "psum_scatter" in capsys.readouterr().out
    main(["plan", "my_training:planned"])
    printed = capsys.readouterr().out
    assert "mesh data=8" in printed and "all_gather" in printed


@pytest.mark.aot(H100)
def test_a_target_gives_a_report_and_a_page(file, capsys, tmp_path) -> None:
    main(["plan", f"{file}:plain", "--target", H100, "--check"])
    out, err = capsys.readouterr()
    assert "train_step on h100:8: 8 devices, mesh data=8" in out
    assert "page: plain-h100-8.html" in out and "psum_scatter" in out
    assert "compiling" in err and "reading the compiled program" in err
    data = first_of((tmp_path / "plain-h100-8.html").read_text())
    assert data["title"] == "train_step on h100:8"
    for spans in (data["device"], data["links"]):
        assert spans == sorted(spans, key=lambda s: s[0]) and spans
        assert all(0 <= s[0] <= s[1] <= data["seconds"] * 1.001 for s in spans)
    assert {s[2] for s in data["links"]} >= {"all_gather", "psum_scatter"}
    # In this step only the weight itself has a name; the loss has none.
    (row, rest) = data["parameters"]
    assert row["shape"] == "256x256" and row["stored"] == 256 * 256 * 4 // 8
    assert set(row["sent"]) == {"all_gather", "psum_scatter"}
    assert rest["name"] == "(no leaf)" and set(rest["sent"]) == {"all_reduce"}
    assert [line[0] for line in data["lines"]] == ["present"] * 3
    assert max(b for _, b in data["memory"]["live"]) == data["memory"]["highest"]


def test_options_of_leaves_are_flags(file, capsys) -> None:
    main(["plan", f"{file}:planned", "--gather-dtype", "bfloat16", "--prefetch", "1"])
    printed = capsys.readouterr().out
    assert "256x256  bfloat16" in printed, "it is gathered so"
    assert printed.endswith("gather_dtype: 'bfloat16'\nprefetch: 1\n")
    main(["plan", f"{file}:planned", "--prefetch", "first", "state=2"])
    assert capsys.readouterr().out.endswith("prefetch: 'first', 2 for state\n")
    main(["plan", f"{file}:planned", "--shard", "state=data", "*=False"])
    assert "shard: ('data',) for state, False" in capsys.readouterr().out
    assert refused("plan", f"{file}:planned", "--prefetch", "-1").startswith(
        "error: prefetch cannot be -1."
    )
    assert "shard=('model',) names mesh axis 'model'" in refused(
        "plan", f"{file}:planned", "--shard", "model"
    )


@pytest.mark.aot(H100)
def test_mesh_shape_and_page_are_options(file, capsys, tmp_path) -> None:
    page = tmp_path / "page.html"
    argv = ["plan", f"{file}:local", "--target", "h100:8", "--html", str(page)]
    main([*argv, "--mesh-shape", "2", "4"])
    assert "mesh replica=2 x data=4" in capsys.readouterr().out
    assert first_of(page.read_text())["subtitle"].endswith("mesh replica=2 x data=4")
    assert "the step's mesh has the axes ('replica', 'data')" in refused(
        *argv, "--mesh-shape", "8"
    )


@pytest.mark.aot(H100)
@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.parametrize("example", ["quickstart.py", "lm_pretrain/train.py"])
def test_the_examples_can_be_planned(example, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # devices are made
    name = f"{ROOT / 'examples' / example}:planned"
    page = tmp_path / "page.html"
    main(["plan", name, "--target", H100, "--html", str(page), "--check"])
    assert "as planned" in capsys.readouterr().out
    data = first_of(page.read_text())
    assert len(data["parameters"]) > 10
    if example != "quickstart.py":
        assert {label.split()[0] for *_, label in data["rounds"]} == {
            *("forward", "backward")
        }


@pytest.mark.aot(H100)
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_a_browser_draws_the_page(file, tmp_path) -> None:
    page = tmp_path / "page.html"
    main(["plan", f"{file}:plain", "--target", H100, "--html", str(page)])
    assert drawn(page).count("<rect") > 10


def test_wrong_names_are_one_message(file) -> None:
    assert refused("plan", "train").startswith(
        "error: 'train' is not of the form MODULE:STEP.\nName a function without"
    )
    assert "there is no module 'no_such' here" in refused("plan", "no_such:planned")
    assert "there is no file no_such.py (looked in " in refused("plan", "no_such.py:x")
    message = refused("plan", f"{file}:train")
    assert "has no 'train'; it has train_step, planned, plain, local" in message
    assert "gave int, not a step and its arguments" in refused(
        "plan", f"{file}:nothing"
    )
    assert "takes the arguments size" in refused("plan", f"{file}:needy")
    assert "is a step, and its arguments are missing" in refused(
        "plan", f"{file}:sharded"
    )
    assert (
        "Pass --target h100:8, or another one, or return what fully_shard(step, mesh) "
        "makes." in refused("plan", f"{file}:plain")
    )
    missing = "error: the step is missing: python -m shardfn plan train.py:planned "
    assert refused("plan").startswith(f"{missing}--target h100:8\nName a function")


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "import no_such_library",
            "{file} raised an error of its own: ModuleNotFoundError: No module named "
            "'no_such_library'\n"
            '  File "{file}", line 1, in <module>\n'
            "    import no_such_library\n"
            "Mend it there; ",
        ),
        (
            "def planned():\n    return {}['batch']",
            "{file}:planned raised an error of its own: KeyError: 'batch'\n"
            '  File "{file}", line 2, in planned\n',
        ),
        (
            "try:\n    {}['a']\nexcept KeyError as error:\n"
            "    raise RuntimeError('no a') from error",
            "{file} raised an error of its own: RuntimeError: no a\n"
            '  File "{file}", line 4, in <module>\n'
            "    raise RuntimeError('no a') from error\n"
            "It comes of KeyError: 'a'\nMend it there; ",
        ),
        ("def planned(:", "{file} raised an error of its own: SyntaxError: "),
    ],
)
def test_errors_of_the_users_code_are_shown_from_there(text, message, tmp_path) -> None:
    file = tmp_path / "shardfn_spoiled.py"
    file.write_text(text)
    shown = refused("plan", f"{file}:planned", "--target", H100)
    assert shown.startswith("error: " + message.replace("{file}", str(file)))
    assert "importlib" not in shown and "load_step.py" not in shown


def test_wrong_targets_are_told_before_anything_runs(monkeypatch) -> None:
    message = refused("plan", "no_such:planned", "--target", "h1000:8")
    assert message.startswith("error: no compile-only target is called 'h1000:8'.")
    monkeypatch.setattr(targets, "_version", lambda package: "")
    message = refused("plan", "no_such:planned", "--target", H100)
    assert message.endswith(
        "Run pip install 'shardfn[aot]', or in a clone pip install -e '.[aot]'"
    )


def test_a_batch_that_does_not_split_is_one_message(file, monkeypatch) -> None:
    """No line of the user's calls the step then, but the command line does."""
    Path(file).write_text(MODULE.replace("(1024, 256)", "(1023, 256)"))
    monkeypatch.setattr(errors, "_is_library", lambda file: True)  # as in a shell
    message = refused("plan", f"{file}:planned")
    assert message.startswith("error: batch") and "1023" in message
    assert f" was called at {file}:planned, by the command line\n" in message


def test_help_and_unknown_commands(capsys) -> None:
    main([])
    assert capsys.readouterr().out.startswith(
        "usage: python -m shardfn plan MODULE:STEP"
    )
    assert refused("train").startswith("error: there is no command 'train'.\nusage:")


def test_missing_packages_name_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "shardfn._api.cli")
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("shardfn", run_name="__main__")
    assert str(caught.value) == (
        "error: the command line needs the package tyro, which is not installed.\n"
        "Run pip install 'shardfn[cli]', or in a clone pip install -e '.[cli]'"
    )


GIVEN = {
    "axis": "data",
    "min_size": 3,
    "strict": True,
    "state_argnums": 0,
    "batch_spec": P("data"),
    "donate": False,
    "per_device_state": (),
    "verify": "off",  # needs a mesh, as the next three, per_device_state and shard_for
    "compiler_options": None,
    "latencies": None,
    "options": None,
    "offload": None,
    "reshard_after_forward": {"*": False},
    "gather_dtype": "bfloat16",
    "reduce_dtype": {"*": "bfloat16"},
    "reduce_rounding": "stochastic",
    "quantize_block": {"*": 64},
    "accumulate": "defer",
    "prefetch": 2,
    "bucket_bytes": 64,
    "shard": False,
    "stationary": {"*": True},
    "shard_for": None,
}
"""A value for each option of `fully_shard`."""


def descends(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, loss


@pytest.mark.parametrize("option", Options.__annotations__)
def test_the_command_line_passes_every_option_on(option: str, monkeypatch) -> None:
    mesh = jax.make_mesh((8,), ("data",))
    monkeypatch.setattr(cli.targets, "mesh", lambda *_: mesh)
    passed: dict[str, Any] = {}

    def made(step: Any, mesh: Any, **options: Any) -> Any:
        passed.update(options)
        return shardfn.fully_shard(step, mesh, **options)

    monkeypatch.setattr(cli, "fully_shard", made)
    local = shardfn.fully_shard(descends, **{option: GIVEN[option]})
    sharded = cli.sharded_on("h100:8", local, None)
    assert passed[option] == GIVEN[option]
    direct = shardfn.fully_shard(descends, mesh, **{option: GIVEN[option]})
    state, batch = jnp.ones((16, 16)), jnp.ones((16, 16))
    assert sharded.plan(state, batch) == direct.plan(state, batch)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--memory", "much"], "--memory 'much' is no size."),
        (["--memory=-1GiB"], "--memory '-1GiB' is no size."),
        (["--memory", "70"], "--memory '70' is 70 bytes, which lacks its unit"),
        (["--memory", "7 parsecs"], "Write 70GiB, 80GB or a number of bytes."),
        (["--compilations", "0"], "--compilations 0: pass one or more."),
        (["--target", "h101:8"], "no compile-only target is called 'h101:8'"),
    ],
)
def test_tuning_refuses_what_it_cannot_do(file, flags, message, monkeypatch) -> None:
    """Also where no compiler is installed."""
    monkeypatch.setattr(targets, "_version", lambda package: "0.1")
    assert message in refused("tune", f"{file}:plain", "--target", H100, *flags)


def test_tuning_tries_what_it_is_asked_for(file, monkeypatch) -> None:
    given = {}

    def tune(step, target, *args, **options):
        given.update(options)
        raise errors.ShardingError("stopped here")

    monkeypatch.setattr(cli, "tune", tune)
    flags = ["--target", H100, "--also", "offload", "reduce_dtype"]
    assert "stopped here" in refused("tune", f"{file}:plain", *flags)
    assert given["also"] == ("offload", "reduce_dtype")
    assert "stopped here" in refused("tune", f"{file}:plain", *flags[:2])
    assert given["also"] == ()


@pytest.mark.parametrize(
    "text, size",
    [
        ("70GiB", 70 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512", 512),
        ("3 mib", 3 << 20),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size) -> None:
    assert cli.bytes_of(text) == size


def test_each_command_is_named_where_one_is_missing() -> None:
    assert "the step is missing: python -m shardfn tune" in refused("tune")
    assert "there is no command 'tuna'" in refused("tuna")


@pytest.mark.aot(H100)
def test_tuning_prints_a_table_and_writes_options(file, capsys, tmp_path) -> None:
    flags = ["--target", H100, "--compilations", "2", "--out", "tuned.json"]
    main(["tune", f"{file}:planned", *flags, "--html", "tuned.html"])
    out, err = capsys.readouterr()
    assert "as it is" in out and "compiled in" in out and "options: tuned.json" in out
    assert "1. as it is: compiling" in err and "page: tuned.html" in out
    pages = pages_of((tmp_path / "tuned.html").read_text())
    titles = [p["name"] for p in pages]
    assert len(titles) == 2 and "as it is" in titles and titles[0] in out
    if shutil.which("chromium"):
        body = drawn(tmp_path / "tuned.html")
        compared = body.partition('id="compared"')[2].partition("</table>")[0]
        assert compared.count("data-at") == 2 and all(t in compared for t in titles)
        for drawing in ("timelines", "memories", "sent"):
            svg = body.partition(f'id="{drawing}"')[2].partition("</svg>")[0]
            assert svg.count("<rect") + svg.count("<path") >= 2, drawing
    assert json.loads((tmp_path / "tuned.json").read_text())["target"] == H100
    main(["plan", f"{file}:plain", "--target", H100, "--tune"])
    out = capsys.readouterr().out
    assert out.index("memory per device") < out.index("as it is") < out.index("page: ")
    main(["tune", f"{file}:plain", "--target", H100, "--compilations", "1"])
    assert "step = shardfn.fully_shard(" in capsys.readouterr().out
    assert "--tune compiles for a target: pass --target h100:8." in refused(
        "plan", f"{file}:planned", "--tune"
    )
    with pytest.raises(SystemExit) as caught:
        main(["tune", f"{file}:plain", *flags[:4], "--memory", "1MiB"])
    assert caught.value.code == 1
    out = capsys.readouterr().out
    assert "nothing of what was tried fits 1.0 MiB; this takes the least of it" in out
    assert "Microbatches, jax.checkpoint, more devices or offload help" in out
    lost = ["tune", f"{file}:plain", *flags[:4], "--memory", "1MiB", "--out", "no.json"]
    with pytest.raises(SystemExit):
        main(lost)
    assert "no.json is not written, as nothing fits" in capsys.readouterr().out
    assert not (tmp_path / "no.json").exists()


@pytest.mark.aot(H100)
def test_a_folder_that_is_missing_is_found_before_anything_compiles(file) -> None:
    for flag in ("--out", "--html"):
        message = refused(
            "tune", f"{file}:plain", "--target", H100, flag, "gone/there.json"
        )
        assert "gone/there.json cannot be written: there is no folder gone." in message


@pytest.mark.aot(H100)
def test_printing_in_a_step_for_gpus_that_are_not_there_is_explained(file) -> None:
    message = refused("plan", f"{file}:prints", "--target", H100)
    assert "noisy prints or calls back to the host" in message
    assert "was called at" in message and "Leave jax.debug.print out" in message
