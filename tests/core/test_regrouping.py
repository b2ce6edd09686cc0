"""In: runs of a dimension and devices. Out: every unit sent to the device that is to
have it, once, by an all-to-all and by permutes.
"""

import itertools
from collections import Counter

import pytest

from shardfn._core.limits import REGROUP_PERMUTES
from shardfn._core.regrouping import Regrouping


@pytest.mark.parametrize(
    "runs, devices",
    [*itertools.product((1, 2, 3, 4, 6, 7, 9, 12, 36), (1, 2, 3, 4, 5, 6, 8, 12))],
)
def test_each_unit_goes_once_to_the_device_that_is_to_have_it(
    runs: int, devices: int
) -> None:
    how = Regrouping(runs, devices)
    left = Counter(
        {(d, u): 1 for d in range(devices) for u in range(runs)},
    )
    for permute in range(how.permutes):
        pairs = how.pairs(permute)
        assert sorted(to for _, to in pairs) == list(range(devices))
        for device, to in pairs:
            unit = how.sent(device, permute)
            assert to == (device * runs + unit) % devices
            left[device, unit] -= 1
    assert set(left.values()) <= {0, 1}
    to_each = Counter((d, (d * runs + u) % devices) for d, u in left.elements())
    assert max(to_each.values(), default=0) <= how.exchanged
    padding = how.exchanged * devices**2 - to_each.total()
    assert not padding or not how.permutes


@pytest.mark.parametrize(
    "runs, devices, permutes",
    [
        (2, 8, 2),
        (2, 512, 2),
        (7, 8, 0),  # padding sends as much
        (9, 8, 1),
        (12, 8, 4),
        (16, 8, 0),
        (REGROUP_PERMUTES, 64, REGROUP_PERMUTES),
        (REGROUP_PERMUTES + 1, 64, 0),
        (3, 2, 1),
    ],
)
def test_few_units_go_by_permutes(runs: int, devices: int, permutes: int) -> None:
    assert Regrouping(runs, devices).permutes == permutes


def test_a_unit_that_stays_is_not_sent() -> None:
    assert not Regrouping(9, 8).cycles()
    assert Regrouping(2, 8).cycles().total() == 2
