"""Text in, batches of byte tokens out.

`load_documents` reads texts, `split` makes the training and the held-out bytes from
them, `training_batches` and `heldout_batches` cut these into windows of T + 1 bytes.
"""

import glob
import pydoc_data.topics
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from step import PADDING

Batch = dict[str, np.ndarray]

HELD_OUT_SHARE = 10  # one byte in ten
REPEAT_LENGTH = 40  # shorter paragraphs repeat by chance
SEPARATOR = b"\n\n"


class DataError(ValueError):
    """The text that was asked for cannot be trained on."""


def load_documents(patterns: Sequence[str]) -> dict[str, str]:
    """Returns text by name: of the files that match, or of Python's help topics."""
    if patterns:
        documents = {path: read_text(path) for path in expand(patterns)}
    else:
        documents = dict(pydoc_data.topics.topics)
    documents = {name: text for name, text in documents.items() if text.strip()}
    if not documents:
        raise DataError(f"--data {' '.join(patterns)}: every file there is empty.")
    return drop_repeats(documents)


def expand(patterns: Sequence[str]) -> list[str]:
    """Returns the files that names and glob patterns stand for, sorted, once each."""
    paths = set()
    for pattern in patterns:
        found = [p for p in glob.glob(pattern, recursive=True) if Path(p).is_file()]
        if not found:
            raise DataError(
                f"--data {pattern}: no such file (looked in {Path.cwd()}). "
                "Give files or glob patterns, for example 'texts/**/*.txt'."
            )
        paths.update(found)
    return sorted(paths)


def read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--data {path}: not UTF-8 text (byte 0x{error.object[error.start]:02x} at "
            f"offset {error.start}). Convert it, or leave it out of --data."
        ) from None
    except OSError as error:
        raise DataError(f"--data {path}: cannot be read ({error.strerror}).") from None


def paragraphs(text: str) -> list[str]:
    blocks = (block.strip() for block in text.split("\n\n"))
    return [block for block in blocks if len(block) >= REPEAT_LENGTH]


def drop_repeats(documents: dict[str, str]) -> dict[str, str]:
    """Drops documents that others quote, or the held-out loss would be of seen text.

    A third of Python's help topics are whole sections of longer topics.
    """
    kept, seen = {}, set()
    for name in sorted(documents, key=lambda name: (-len(documents[name]), name)):
        blocks = paragraphs(documents[name])
        repeated = sum(len(block) for block in blocks if block in seen)
        if repeated <= sum(map(len, blocks)) / 5:
            kept[name] = documents[name]
            seen.update(blocks)
    return kept


def split(documents: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns training and held-out bytes; about a tenth is held out, whole documents.

    When no document is that short, the last tenth of the longest is held out.
    """
    texts = {name: documents[name].encode() for name in documents}
    room = sum(map(len, texts.values())) // HELD_OUT_SHARE
    heldout = []
    for name in sorted(texts, key=lambda name: zlib.crc32(name.encode())):
        if len(texts[name]) <= room:
            room -= len(texts[name])
            heldout.append(texts.pop(name))
    if not heldout:
        longest = max(texts, key=lambda name: len(texts[name]))
        cut = len(texts[longest]) - room
        heldout.append(texts[longest][cut:])
        texts[longest] = texts[longest][:cut]
    return tokens(list(texts.values())), tokens(heldout)


def tokens(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(SEPARATOR.join(texts), np.uint8)


def check_length(name: str, tokens_N: np.ndarray, needed: int) -> None:
    if len(tokens_N) < needed:
        raise DataError(
            f"the {name} text has {len(tokens_N)} bytes and at least {needed} are "
            "needed. Give more --data, or a smaller --batch-size or --model.context."
        )


def training_batches(
    tokens_N: np.ndarray, batch_size: int, context: int, seed: int
) -> Iterator[Batch]:
    """Returns batches of windows from random places, without end."""
    check_length("training", tokens_N, batch_size * (context + 1))
    rng = np.random.default_rng(seed)

    def batch() -> Batch:
        starts_B = rng.integers(0, len(tokens_N) - context, batch_size)
        return to_batch(tokens_N[starts_B[:, None] + np.arange(context + 1)])

    return iter(batch, None)


def heldout_batches(tokens_N: np.ndarray, batch_size: int, context: int) -> list[Batch]:
    """Returns batches with every byte but the first as a target once, padded."""
    check_length("held-out", tokens_N, context + 1)
    rows = -(-(len(tokens_N) - 1) // (batch_size * context)) * batch_size
    padded = np.full(rows * context + 1, PADDING, np.int32)
    padded[: len(tokens_N)] = tokens_N
    windows_RxS = padded[np.arange(rows)[:, None] * context + np.arange(context + 1)]
    return [
        to_batch(windows_BxS)
        for windows_BxS in np.split(windows_RxS, rows // batch_size)
    ]


def to_batch(windows_BxS: np.ndarray) -> Batch:
    windows_BxS = windows_BxS.astype(np.int32)
    inputs_BxT = np.maximum(windows_BxS[:, :-1], 0)
    return {"inputs": inputs_BxT, "targets": windows_BxS[:, 1:]}


def unigram_entropy(tokens_N: np.ndarray) -> float:
    """Returns nats per byte of the best model that knows only how often bytes occur."""
    counts = np.bincount(tokens_N, minlength=256)
    p = counts[counts > 0] / len(tokens_N)
    return float(-np.sum(p * np.log(p)))
