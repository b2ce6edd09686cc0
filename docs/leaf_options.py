"""In: the table of the options that may differ from leaf to leaf. Out: a table on the
page that asks for it, and `fully_shard` with a parameter and an entry for each row.
"""

import ast
import inspect

import griffe

import shardfn
from shardfn._core import leaf_options
from shardfn._core.leaf_options import LEAF_OPTIONS

PLACE = "<!-- the table of leaf options -->"
"""The line of a page that the table replaces."""

TRANSFORM = "shardfn._api.fully_shard.fully_shard"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs with every page."""
    return markdown.replace(PLACE, table())


def table() -> str:
    """A row per option."""
    rows = [("option", "takes", "default", "read by"), ("---",) * 4]
    for option in LEAF_OPTIONS.values():
        name, default = f"`{option.name}`", f"`{option.default_given!r}`"
        readers = ", ".join(f"`{module}`" for module in option.read_by)
        rows.append((name, option.values.allowed, default, readers))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def annotations() -> dict[str, str]:
    """What users may pass to each option, as the table spells it."""
    (rows,) = ast.parse(inspect.getsource(leaf_options.LeafOptions)).body
    found = {}
    for row in rows.body:
        if isinstance(row, ast.AnnAssign):
            passed, _ = row.annotation.slice.elts
            found[row.target.id] = ast.unparse(passed)
    return found


class LeafOptionsOfTransform(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.path != TRANSFORM or not obj.docstring:
            return
        obj.docstring.value = inspect.cleandoc(shardfn.fully_shard.__doc__ or "")
        types = annotations()
        del obj.parameters["leaf_options"]
        for option in LEAF_OPTIONS.values():
            obj.parameters.add(
                griffe.Parameter(
                    option.name,
                    annotation=types[option.name],
                    kind=griffe.ParameterKind.keyword_only,
                    default=repr(option.default_given),
                )
            )
