"""In: names that HTML would take for its own. Out: a page that shows them."""

import json
import re
from types import SimpleNamespace

import pytest

from shardfn.analysis import _html


@pytest.mark.parametrize("name", ["<!--<script>", "</script>", "]]>", "a & b"])
def test_no_name_ends_or_hides_the_script(name: str, monkeypatch) -> None:
    monkeypatch.setattr(_html, "page_data", lambda _: {"name": name})
    page = _html.page(SimpleNamespace(step=name, target=SimpleNamespace(name="h100")))
    (data,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    assert "<" not in data and json.loads(data) == {"name": name}
    assert page.count("<script") == page.count("</script>")
