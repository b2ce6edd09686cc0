"""Clicks on advertisements, made up, in the shapes of Criteo's: 13 counts, 26
categories and whether there was a click. Batch number n is the same on every machine.
"""

import numpy as np

COUNTS = 13
SIZES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593)
SIZES += (3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105)
SIZES += (142572,)
"""Categories of each of Criteo's 26 features (the data of its Kaggle challenge)."""


def table_sizes(most: int) -> np.ndarray:
    """Rows for each feature: its categories are hashed to at most so many."""
    return np.minimum(SIZES, most)


def make_batch(number: int, rows: int, most: int) -> dict[str, np.ndarray]:
    """Examples; few categories are frequent, and most are rare.

    Returns:
      `counts_BxN`, logarithms; `ids_BxF`, rows of one table that has those of all
      features one after the other; and `clicked_B`.
    """
    random = np.random.default_rng(number)
    sizes = table_sizes(most)
    ids_BxF = np.floor(sizes ** random.random((rows, len(sizes)))).astype(np.int64) - 1
    counts_BxN = random.standard_normal((rows, COUNTS))
    offsets_F = np.cumsum(sizes) - sizes
    all_ids_BxF = ids_BxF + offsets_F
    # What each category says of a click, without a table of it.
    says_BxF = np.sin(12.9898 * all_ids_BxF) * (np.arange(len(sizes)) % 3 == 0)
    odds_B = says_BxF.sum(1) + 0.5 * counts_BxN[:, :4].sum(1) - 1.0
    clicked_B = random.random(rows) < 1 / (1 + np.exp(-odds_B))
    return {
        "counts_BxN": counts_BxN.astype(np.float32),
        "ids_BxF": all_ids_BxF.astype(np.int32),
        "clicked_B": clicked_B.astype(np.float32),
    }
