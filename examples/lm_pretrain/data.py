"""Documents in, batches of packed windows out, through `grain`.

Documents stand one after the other, each behind an `end` token, and are cut into
windows of T + 1 tokens. `segments` says which document of its window a token belongs
to, and `positions` where in it; attention stays inside segments. A target of PADDING
counts for nothing.

Window i of a run depends on the seed alone, and a batch is the windows i, i + 1, ...,
shared out over the processes. So the whole state of the iterator is the number of the
next batch, and a run may go on with another number of processes.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import grain
import numpy as np
from attention import PADDING
from documents import DataError
from tokens import Tokenizer

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Documents as one array of tokens.

    Attributes:
      tokens_N: all tokens.
      starts_M: where each document's `end` token stands.
      bytes: size of the text as UTF-8.
    """

    tokens_N: np.ndarray
    starts_M: np.ndarray
    bytes: int

    def window(self, start: int, context: int) -> Batch:
        """Returns T tokens from `start` and their targets, padded at the end."""
        tokens_S = self.tokens_N[start : start + context + 1].astype(np.int32)
        tokens_S = np.pad(
            *(tokens_S, (0, context + 1 - len(tokens_S))), constant_values=PADDING
        )
        places_T = start + np.arange(context)
        documents_T = np.searchsorted(self.starts_M, places_T, side="right") - 1
        firsts_T = np.maximum(self.starts_M[documents_T], start)
        return {
            "inputs": np.maximum(tokens_S[:-1], 0),
            "targets": tokens_S[1:],
            "segments": (documents_T - documents_T[0]).astype(np.int32),
            "positions": (places_T - firsts_T).astype(np.int32),
        }


def pack(documents: Mapping[str, str], tokenizer: Tokenizer) -> Packed:
    dtype = np.uint8 if tokenizer.size <= 2**8 else np.uint32
    parts, starts, size, place = [], [], 0, 0
    for text in documents.values():
        tokens = tokenizer.encode(text)
        parts += [np.array([tokenizer.end], dtype), tokens.astype(dtype)]
        starts.append(place)
        place += 1 + len(tokens)
        size += len(text.encode())
    return Packed(np.concatenate(parts), np.array(starts), size)


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of each batch this process reads."""

    batch_size: int
    process: int = 0
    processes: int = 1

    def of(self, dataset: grain.MapDataset) -> grain.MapDataset:
        rows = self.batch_size // self.processes
        return dataset[self.process :: self.processes].batch(rows)


def training_batches(
    packed: Packed, context: int, share: Share, seed: int
) -> grain.DatasetIterator:
    """Returns batches without end; every epoch cuts other windows, in another order."""
    needed = share.batch_size + context + 1
    check_length("training", packed, needed)
    last = len(packed.tokens_N) - context - 1

    def window(i: int, rng: np.random.Generator) -> Batch:
        start = i * context + int(rng.integers(context))
        return packed.window(min(start, last), context)

    dataset = grain.MapDataset.range(max(1, last // context)).seed(seed)
    dataset = share.of(dataset.shuffle().repeat().random_map(window))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def heldout_batches(packed: Packed, context: int, share: Share) -> Iterator[Batch]:
    """Returns batches with every token but the first as a target once, padded."""
    check_length("held-out", packed, 2)
    real = -(-(len(packed.tokens_N) - 1) // context)
    rows = -(-real // share.batch_size) * share.batch_size
    dataset = grain.MapDataset.range(rows)
    dataset = share.of(dataset.map(lambda i: packed.window(i * context, context)))
    return iter(dataset)


def check_length(name: str, packed: Packed, needed: int) -> None:
    if len(packed.tokens_N) < needed:
        raise DataError(
            f"the {name} text has {len(packed.tokens_N)} tokens and at least {needed} "
            "are needed. Give more text, or a smaller --batch-size or --model.context."
        )


def unigram_entropy(documents: Mapping[str, str]) -> float:
    """Returns nats per byte of the best model that knows only how often bytes occur."""
    text = "".join(documents.values()).encode()
    counts = np.bincount(np.frombuffer(text, np.uint8), minlength=256)
    p = counts[counts > 0] / len(text)
    return float(-np.sum(p * np.log(p)))
