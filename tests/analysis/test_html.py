"""In: names that HTML would take for its own. Out: a page that shows them."""

import json
import re
from types import SimpleNamespace

import pytest

import shardfn
from shardfn.analysis import _html


@pytest.mark.parametrize("name", ["<!--<script>", "</script>", "]]>", "a & b"])
def test_no_name_ends_or_hides_the_script(name: str, monkeypatch) -> None:
    monkeypatch.setattr(_html, "page_data", lambda r: {"name": r.step})
    report = SimpleNamespace(step=name, target=SimpleNamespace(name="h100"))
    page = _html.page({name: report, "other": report})  # pyright: ignore
    (data,) = re.findall(r"^const pages = (.*);$", page, re.MULTILINE)
    assert "<" not in data
    assert [shown["name"] for shown in json.loads(data)] == [name, name]
    assert page.count("<script") == page.count("</script>")


def test_a_page_needs_a_report() -> None:
    with pytest.raises(ValueError, match="compare.. was given no report.\nPass what"):
        shardfn.analysis.compare({})
