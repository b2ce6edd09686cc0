"""In: a seed. Out: a host batch of `ROWS` rows that depends on nothing else."""

import numpy as np

ROWS = 16


def tokens(seed: int, length: int = 7, vocab: int = 101) -> dict[str, np.ndarray]:
    """Token ids `[ROWS, length]` and the ids to predict."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (ROWS, length + 1), dtype=np.int32)
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def vectors(seed: int, width: int = 7, outputs: int = 5) -> dict[str, np.ndarray]:
    """Inputs `x [ROWS, width]` and a smooth function of them, `y [ROWS, outputs]`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, width), dtype=np.float32)
    mix = np.random.default_rng(99).standard_normal((width, outputs), dtype=np.float32)
    return {"x": x, "y": np.tanh(x @ mix)}


def images(seed: int, size: int = 8, classes: int = 7) -> dict[str, np.ndarray]:
    """Images `[ROWS, size, size, 3]` and their classes `[ROWS]`."""
    rng = np.random.default_rng(seed)
    image = rng.standard_normal((ROWS, size, size, 3), dtype=np.float32)
    return {"image": image, "label": rng.integers(0, classes, ROWS, dtype=np.int32)}
