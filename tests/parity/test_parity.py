"""In: every plain program. Out: over 8 devices it computes what it does over one, each
leaf of the state and of the metrics after each of five steps.
"""

import programs
import pytest
from sharded_and_plain import assert_parity, make_mesh

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("name", programs.names())
def test_eight_devices_compute_what_one_does(name: str) -> None:
    # The optimizers' programs share their parameters: one birth is enough for them.
    born_sharded = not name.startswith("opt_")
    assert_parity(programs.get(name), make_mesh("8"), born_sharded=born_sharded)
