"""Files of a run: texts in, files out that are whole or not there."""

import itertools
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that no kill leaves half written."""
    if path.is_dir():
        put_away(path)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def put_away(path: Path) -> Path:
    """Gives what is in the way of a file another name, and returns that."""
    names = (path.with_name(f"{path.name}.bad{i}") for i in itertools.count())
    bad = next(name for name in names if not name.exists())
    return path.rename(bad)
