"""In: the text of the package. Out: the first line of every message that users may see.

Those are of `ShardingError`, of warnings, and of whatever public modules raise; `…`
stands for what is filled in.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shardfn

ROOT = Path(shardfn.__file__).parent
PLACE = "…"
# Errors that users see wherever they are raised.
PUBLIC_ERRORS = (
    "ShardingError",
    "ElsewhereError",
    "CheckpointError",
    "DamagedCheckpointError",
    "LoadError",
    "FileNotFoundError",
    "ImportError",
)
# Messages that another function returns.
RETURNED = {
    "ShardingError(found['late'])": ("process … has …, and process … has not in … s."),
    "ImportError(reason)": (
        "compiling for … needs the package …, which is not installed."
    ),
}


def template(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """The text that an expression makes; `names` holds what is assigned beside it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part, names) for part in parts)
        case ast.FormattedValue(value=ast.Name() as name) | (ast.Name() as name):
            known = names.get(name.id)
            others = {k: v for k, v in names.items() if k != name.id}
            made = template(known, others) if known else PLACE
            return PLACE if made.strip(PLACE) == "" else made
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, names) + template(right, names)
        case ast.Call(func=ast.Name(id="called")):
            return "\n"
    return PLACE


def messages(path: Path) -> Iterator[str]:
    """The first lines of a module's messages, whitespace collapsed."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            names = {
                target.id: node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and _is_seen(node, path):
                    line = template(node.args[0], names).split("\n")[0]
                    line = re.sub(rf"\s+|{PLACE}+", _collapse, line).strip()
                    yield RETURNED[ast.unparse(node)] if line == PLACE else line


def _collapse(found: re.Match[str]) -> str:
    return PLACE if PLACE in found[0] else " "


def _is_seen(call: ast.Call, path: Path) -> bool:
    match call.func:
        case ast.Name(id=name) if name in PUBLIC_ERRORS:
            return bool(call.args)
        case ast.Attribute(attr="warn") | ast.Name(id="warn"):
            return bool(call.args)
        case ast.Name(id=name):
            is_error = name.endswith(("Error", "Warning")) and name != "AssertionError"
            is_private = any(p.startswith("_") for p in path.relative_to(ROOT).parts)
            return is_error and bool(call.args) and not is_private
    return False


def all_messages() -> dict[str, list[str]]:
    """Every message by its first line, and the modules that have it."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for line in messages(path):
            modules = found.setdefault(line, [])
            if path.name not in modules:
                modules.append(path.name)
    return found
