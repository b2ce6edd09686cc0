"""Text to tokens and back: bytes, or a file of the `tokenizers` library."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from config import DataConfig
from documents import DataError


class Tokenizer(Protocol):
    """`size` tokens, of which `end` stands in front of each document."""

    size: int
    end: int

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, tokens: np.ndarray) -> str: ...


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One token per byte of UTF-8, which never has the byte 255: it is `end`."""

    size: int = 256
    end: int = 255

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        kept = np.asarray(tokens)[np.asarray(tokens) != self.end]
        return kept.astype(np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class FromFile:
    tokenizer: Any
    size: int
    end: int

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(np.asarray(tokens).tolist())


def load_tokenizer(config: DataConfig) -> Tokenizer:
    if config.tokenizer == "bytes":
        return Bytes()
    if not Path(config.tokenizer).is_file():
        raise DataError(
            f"--data.tokenizer {config.tokenizer}: no such file. Give `bytes`, or make "
            "a tokenizer with train_tokenizer.py."
        )
    tokenizers = library()
    try:
        tokenizer = tokenizers.Tokenizer.from_file(config.tokenizer)
    except Exception as error:  # the library raises no other
        raise DataError(
            f"--data.tokenizer {config.tokenizer}: is no file of the `tokenizers` "
            f"library ({error}). Make one with train_tokenizer.py."
        ) from None
    end = tokenizer.token_to_id(config.end)
    if end is None:
        raise DataError(
            f"--data.tokenizer {config.tokenizer}: has no token '{config.end}' to "
            "stand between documents. Name the one it has with --data.end."
        )
    return FromFile(tokenizer, tokenizer.get_vocab_size(), end)


def library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "a tokenizer from a file needs the package `tokenizers`: "
            "pip install tokenizers"
        ) from None
    return tokenizers
