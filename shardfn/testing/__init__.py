"""Tools for the tests of those who use the library.

In: a plain step and a sharded one. Out: an error that names the leaf in which they
differ. Imports every package.
"""

from shardfn.testing.parity import (
    assert_parity as assert_parity,
    assert_same as assert_same,
)

__all__ = ["assert_parity", "assert_same"]
