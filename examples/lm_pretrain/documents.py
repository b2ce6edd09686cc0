"""Named texts from files, from Python's help topics, or from a Hugging Face data set.

Out: documents by name, those to train on and those held out. A text that cannot be read
is an error that names it.
"""

import glob
import pydoc_data.topics
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import DataConfig

HELD_OUT_SHARE = 10  # one byte in ten
REPEAT_LENGTH = 40  # shorter paragraphs repeat by chance

Documents = dict[str, str]


class DataError(ValueError):
    """The text that was asked for cannot be trained on."""


def load_documents(config: DataConfig) -> Documents:
    """Returns text by name, without empty ones and without repeats."""
    if config.hf:
        documents = from_hugging_face(config)
    elif config.files:
        documents = {path: read_text(path) for path in expand(config.files)}
    else:
        documents = dict(pydoc_data.topics.topics)
    documents = {name: text for name, text in documents.items() if text.strip()}
    if not documents:
        source = config.hf or " ".join(config.files)
        raise DataError(f"{source}: every document there is empty.")
    return drop_repeats(documents)


def expand(patterns: Sequence[str]) -> list[str]:
    """Returns the files that names and glob patterns stand for, sorted, once each."""
    paths = set()
    for pattern in patterns:
        found = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not found:
            raise DataError(
                f"--data.files {pattern}: no such file (looked in {Path.cwd()}). "
                "Give files or glob patterns, for example 'texts/**/*.txt'."
            )
        paths.update(found)
    return sorted(paths)


def read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data.files {path}: not UTF-8 text (byte "
            f"0x{error.object[error.start]:02x} at offset {error.start}). Convert it, "
            "or leave it out."
        ) from None
    except OSError as error:
        raise DataError(
            f"--data.files {path}: cannot be read ({error.strerror})."
        ) from None


def from_hugging_face(config: DataConfig) -> Documents:
    """Returns the rows of one column, each a document."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "--data.hf needs the package `datasets`: pip install datasets"
        ) from None
    name = f"--data.hf {config.hf}"
    try:
        if (Path(config.hf) / "state.json").is_file() or (
            Path(config.hf) / "dataset_dict.json"
        ).is_file():
            found: Any = datasets.load_from_disk(config.hf)
            if isinstance(found, datasets.DatasetDict):
                found = found[config.hf_split]
        else:
            found = datasets.load_dataset(
                config.hf, config.hf_config, split=config.hf_split
            )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{name}: split '{config.hf_split}' cannot be loaded: {error}"
        ) from None
    if config.hf_column not in found.column_names:
        raise DataError(
            f"{name}: no column '{config.hf_column}'; there are {found.column_names}. "
            "Give one of them as --data.hf-column."
        )
    column = found[config.hf_column]
    return {f"{config.hf}[{i}]": text for i, text in enumerate(column) if text}


def paragraphs(text: str) -> list[str]:
    blocks = (block.strip() for block in text.split("\n\n"))
    return [block for block in blocks if len(block) >= REPEAT_LENGTH]


def drop_repeats(documents: Documents) -> Documents:
    """Drops documents that others quote, or the held-out loss would be of seen text.

    A third of Python's help topics are whole sections of longer topics.
    """
    kept, seen = {}, set()
    for name in sorted(documents, key=lambda name: (-len(documents[name]), name)):
        blocks = paragraphs(documents[name])
        repeated = sum(len(block) for block in blocks if hash(block) in seen)
        if repeated <= sum(map(len, blocks)) / 5:
            kept[name] = documents[name]
            seen.update(map(hash, blocks))
    return kept


def split(documents: Documents) -> tuple[Documents, Documents]:
    """Returns documents to train on and held-out ones, about a tenth of the bytes.

    When no document is that short, the last tenth of the longest is held out.
    """
    train = dict(documents)
    room = sum(len(text.encode()) for text in train.values()) // HELD_OUT_SHARE
    heldout = {}
    for name in sorted(train, key=lambda name: zlib.crc32(name.encode())):
        size = len(train[name].encode())
        if size <= room:
            room -= size
            heldout[name] = train.pop(name)
    if not heldout:
        longest = max(train, key=lambda name: len(train[name]))
        text = train[longest]
        cut = len(text) - len(text) // HELD_OUT_SHARE
        train[longest], heldout[longest] = text[:cut], text[cut:]
    return train, heldout
