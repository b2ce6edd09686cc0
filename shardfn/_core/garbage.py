"""Planning without pauses in which Python looks for garbage.

In: code that makes many objects which live until it is done. Out: the same code, in
which nothing looks for objects that refer to each other in circles, which is for
nothing there: each look goes through all that the program has imported and made.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Runs a block, or a function that it decorates, without collections. Where the
    user has none, there are none behind it, either.

    What they would free lives until the next one. Objects in no circles are freed at
    once, as ever. It is of the process: of two threads that plan, the first that is
    done ends it for both.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
