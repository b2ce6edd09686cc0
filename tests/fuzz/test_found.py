"""In: programs that once came out wrong, as small as they still did. Out: they do not.

A line says what was wrong. To add one: `SHARDFN_FUZZ=500` prints the program.
"""

import warnings

import pytest
from language import Block, Call, Program, Type
from oracle import SAME, assert_same_steps

import shardfn

ROWS = (Type((24,)), Type((24,), "i"))

FOUND = {
    "an empty list was an argument of the state, as SGD's is": Program(
        params=(Type((7,)),),
        batch=ROWS,
        forward=Block((Call("neg", ("b0",)),), ()),
        losses=("v0",),
        form="several",
    ),
    "every device added the literal in 1 + |g|^2 + |h|^2": Program(
        params=(Type((36,)), Type((8,))),
        batch=ROWS,
        forward=Block((Call("neg", ("b0",)),), ()),
        losses=("v0",),
    ),
    "equal equations of two calls, on other literals, were merged": Program(
        params=(Type((7,)),),
        batch=ROWS,
        forward=Block((Call("dropout", ("p0", "key"), (("fold", 2),)),), ()),
        losses=("v0",),
    ),
    "a call that jax 0.12 makes of a scan had its body under another name": Program(
        params=(Type((12,)), Type((4, 12, 12))),
        batch=(Type((24, 12)),),
        forward=Block(
            (
                Call(
                    "layers",
                    ("b0", "p0", "p1"),
                    (("consts", 1), ("carry", 1), ("reverse", True)),
                    (
                        Block(
                            (
                                Call("dense", ("i1", "i2")),
                                Call("wrap", ("i1",)),
                            ),
                            ("v1",),
                        ),
                    ),
                ),
                Call("sort", ("v0",), (("axis", 0),)),
            ),
            (),
        ),
        losses=("v1",),
        wrap="remat",
    ),
    "XLA lost the clamp of a slice that is split over devices": Program(
        params=(Type((7,)), Type((4, 3))),
        batch=ROWS,
        counts=(Type((), "B"),),
        forward=Block(
            (
                Call("slice_any", ("p0", "c0"), (("axis", 0), ("size", 4))),
                Call("dense", ("v0", "p1")),
                Call("squash", ("v1",)),
            ),
            (),
        ),
        losses=("v2",),
    ),
    "a while loop under vmap has an array for a condition": Program(
        params=(Type((5, 5)), Type((5,))),
        batch=(Type((24, 5)), Type((24,), "i")),
        forward=Block(
            (
                Call(
                    "vmap",
                    ("b1", "b0"),
                    (("in_axes", (0, 0)),),
                    (
                        Block(
                            (
                                Call(
                                    "while_",
                                    ("i0", "i1"),
                                    (),
                                    (
                                        Block(
                                            (
                                                Call("add", ("i0", "i0")),
                                                Call("wrap", ("v0",)),
                                            ),
                                            ("v1",),
                                        ),
                                    ),
                                ),
                            ),
                            ("v0",),
                        ),
                    ),
                ),
                Call("dense", ("v0", "p0")),
            ),
            ("v0",),
        ),
        losses=("v1",),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_is_right(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardfn.UnsupportedPrimitiveWarning)
        warnings.simplefilter("ignore", shardfn.UnusedAxisWarning)
        assert assert_same_steps(FOUND[name]) == SAME
