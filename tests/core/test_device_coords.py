"""In: devices. Out: where they are on their links, whatever process runs them."""

from types import SimpleNamespace

import pytest

from shardfn._core.device_coords import coords_of, slices_of
from shardfn.analysis import targets
from shardfn.analysis._latency import transfer


def test_a_device_that_does_not_say_where_it_is() -> None:
    gpu = SimpleNamespace(process_index=3, id=25, slice_index=1)
    assert coords_of(gpu) == (1, 3, 25)
    assert coords_of(SimpleNamespace(process_index=0, id=2)) == (0, 0, 2)


@pytest.mark.parametrize("processes", [1, 8])
def test_a_host_is_as_fast_with_one_process_as_with_eight(processes: int) -> None:
    """XLA gives a GPU the slice of its host, the number of its process there, and its
    own number in the process."""
    each = 8 // processes
    gpus = [
        SimpleNamespace(coords=(host, number // each, number % each))
        for host in range(2)
        for number in range(8)
    ]
    coords, target = [coords_of(gpu) for gpu in gpus], targets.target("h100:16")
    assert slices_of(gpus) == 2
    assert transfer(target, "all_gather", 1e9, coords[:8]).links == 1e9 / 450e9
    assert transfer(target, "all_gather", 1e9, coords).links == 1e9 / 400e9


def test_gpus_that_are_there_have_their_data_sheet() -> None:
    """The driver calls an H200 otherwise than the compiler's description of it."""
    from shardfn.analysis._rates import KINDS

    assert KINDS["NVIDIA H200"] == KINDS["NVIDIA H200 141GB HBM3e"] == "h200"
    assert KINDS["NVIDIA H100 80GB HBM3"] == "h100"
