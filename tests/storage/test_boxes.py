"""In: random shapes. Out: runs of elements are covered by boxes once each, and every
chunk of a flattened leaf is a run with one writer.
"""

import math
import random

import numpy as np
import pytest

from shardfn.storage._boxes import chunks_of, pieces, runs

RANDOM = [random.Random(seed) for seed in range(200)]


@pytest.mark.parametrize("rng", RANDOM, ids=range(len(RANDOM)))
def test_runs_are_boxes(rng: random.Random) -> None:
    for _ in range(20):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        size = math.prod(shape)
        start, stop = sorted((rng.randint(0, size), rng.randint(0, size)))
        elements = np.arange(size).reshape(shape)
        found = list(runs(start, stop, shape))
        covered = [elements[box].ravel() for box, _, _ in found]
        assert [i for part in covered for i in part] == list(range(start, stop))
        assert [(a, b) for _, a, b in found] == [(p[0], p[-1] + 1) for p in covered]
        assert len(found) <= 2 * len(shape) - 1


@pytest.mark.parametrize("rng", RANDOM[:60], ids=range(60))
def test_a_chunk_is_a_run_with_one_writer(rng: random.Random) -> None:
    rank = rng.randint(2, 4)
    shape = tuple(rng.randint(1, 12) for _ in range(rank))
    start, shards = rng.randint(0, rank - 2), rng.choice([2, 3, 4, 8])
    tail, size = shape[start:], math.prod(shape[start:])
    block = -(-size // shards)
    chunks = chunks_of(shape, (*shape[:start], block * shards), shards)
    assert chunks.chunk[:start] == shape[:start]
    grid = np.array(chunks.chunk[start:])
    of = np.empty(tail, int)
    for index in np.ndindex(*tail):
        of[index] = np.ravel_multi_index(
            tuple(np.array(index) // grid), tuple(-(-np.array(tail) // grid))
        )
    of = of.ravel()
    assert (np.diff(of) >= 0).all(), "a chunk's elements follow each other"
    assert np.bincount(of).max() <= max(block // 8, 1), "chunks are small"
    begins = [i for i in range(size) if i == 0 or of[i] != of[i - 1]]
    for i in range(size + 1):
        assert chunks.ceil(i) == min((b for b in begins if b >= i), default=size)
        assert i == size or chunks.floor(i) == max(b for b in begins if b <= i)
    ends = [min((i + 1) * block, size) for i in range(shards)]
    assert chunks.halo(shards) == max(chunks.ceil(end) - end for end in ends)
    assert chunks.halo(shards) < max(block // 8, 1)


CASES = [
    ((16, 3), (16, 3), 8, 0),
    ((17, 3), (24, 3), 8, 0),
    ((3, 17), (3, 18), 2, 1),
    ((5, 7), (40,), 8, 0),
    ((2, 5, 7), (2, 36), 4, 1),
    ((2, 3, 5, 7), (2, 3, 40), 8, 2),
    ((3, 3), (16,), 8, 0),
]


@pytest.mark.parametrize("shape, stored, shards, dim", CASES)
def test_pieces_of_all_shards_are_the_leaf(shape, stored, shards, dim) -> None:
    leaf = np.arange(math.prod(shape)).reshape(shape) + 1
    view = leaf.reshape((*shape[: len(stored) - 1], -1))
    if len(stored) == len(shape):
        view = leaf
    pads = [(0, n - m) for n, m in zip(stored, view.shape, strict=True)]
    array, found = np.pad(view, pads), np.zeros_like(leaf)
    for shard in range(shards):
        step = stored[dim] // shards
        index = [slice(None)] * len(stored)
        index[dim] = slice(shard * step, (shard + 1) * step)
        block = array[tuple(index)]
        for piece in pieces(shape, stored, index):
            assert not found[piece.box].any(), "no element twice"
            found[piece.box] = block[piece.source].reshape(piece.shape)
    np.testing.assert_array_equal(found, leaf)
