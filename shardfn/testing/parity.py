"""A proof for one's own step: sharded, it computes what it computes on one device.

In: a plain step, a mesh, a state and a batch. Out: nothing, or an AssertionError that
names the first step and leaf that differ, and by how much.
"""

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
from jax.sharding import Mesh

from shardfn._api.fully_shard import fully_shard
from shardfn._api.options import Options
from shardfn._api.sharded_step import ShardedStep
from shardfn._core import processes
from shardfn._core.errors import call_site, calling, names_call, warn
from shardfn._core.reading_limits import DECIDED_BY_ROUNDING, ROUNDING_FACTOR
from shardfn._core.sharding import show
from shardfn._core.shown_limits import SHOWN_LEAVES
from shardfn._core.static_leaves import close_static
from shardfn.storage._mesh_context import on_each
from shardfn.testing._checked_arguments import check_parity, check_same
from shardfn.testing._compare import Snapshot, differences, snapshot
from shardfn.testing._next_arguments import NextArguments
from shardfn.testing._rounding_noise import Noise, noise


@names_call
def assert_parity(
    step: Callable[..., Any],
    /,
    mesh: Mesh,
    state: Any,
    *batch: Any,
    steps: int = 2,
    tol: float = 1e-5,
    ignore: Sequence[str | re.Pattern[str]] = (),
    **options: Unpack[Options],
) -> None:
    """Asserts that `fully_shard(step, mesh)` computes what `step` computes, leaf by
    leaf.

    Runs both from the same state, the plain step under `jax.jit` on one device, and
    compares every result of every step: structure, shapes, dtypes and values. The whole
    state has to fit on one device: take a small model. If several processes have the
    devices, all call it with the same arguments, and each compares all.

    Rounding alone may decide a leaf: one whose true gradient is zero (the bias in front
    of a batch norm) has a gradient of nothing but rounding errors, and Adam divides it
    by its own size, so that the update is -1 or 1 at random; so do optimizers that take
    the gradient's sign. If a leaf differs by more than `tol`, the plain step is run
    from arguments of which every element is rounded another way, as is what the step
    casts to a narrower dtype such as bfloat16, and the leaf may differ by four times
    what that changes. A leaf that this changes by more than a tenth is decided by
    rounding, so that passing says little: a warning names it. If a leaf differs and
    most are decided so, the assertion fails.

    Args:
      step: pure function `(state, *batch) -> (state, ...)` for one device, or any other
        that `fully_shard` takes: all of its states, and caches of the batch, go on from
        step to step.
      mesh: mesh of the devices to shard over.
      state: its first argument, such as the whole state, on the host or on any device;
        it is left as it is.
      *batch: the step's other arguments, of global shapes.
      steps: number of steps, each compared, all on the same batch.
      tol: largest norm of the difference of a floating-point leaf, relative to the
        leaf's norm, if rounding does not move it further. The default is for float32;
        sums in bfloat16 agree to about 6e-2, in float64 to 1e-14. Other leaves have to
        be equal to the bit.
      ignore: regular expressions, compiled or not; leaves of the state whose path one
        is found in have to agree in shape and dtype only.
      **options: arguments of `fully_shard`. `min_size` is 0 unless given, so that small
        models are sharded too.

    Returns:
      None. A `UserWarning` names leaves that rounding decides and that differ by more
      than `tol`; all others, but those of `ignore`, agree.

    Raises:
      AssertionError: a result differs, or no leaf of the state is split over the mesh,
        in which case nothing would be proved.
      ShardingError: the step or its arguments cannot be sharded, or it is sharded
        already.
      TypeError: there is no such argument.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from shardfn.testing import assert_parity
      >>> def train_step(w, x):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      ...     return w - 0.1 * grad, loss
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> assert_parity(train_step, mesh, jnp.ones((4, 16)), jnp.ones((8, 4)))
    """
    _check_names(options)
    check_parity(step, mesh, steps, tol, ignore)
    given: Options = {"min_size": 0, **options}
    made = fully_shard(step, mesh, **given)
    with calling(step):
        sharded, start, _ = made.as_pure((state, *batch), {})
        then = _next_arguments(sharded, start)
    plain = jax.jit(sharded.plain.step)
    stored = close_static(sharded.shard(then.given(start)))
    where = f"{getattr(step, '__name__', 'the step')} over {dict(mesh.shape)}"
    _assert_is_split(sharded, stored, where)
    args, there = list(start), then.with_states(start, stored)
    decided: dict[str, float] = {}
    for k in range(steps):
        expected, got = plain(*args), sharded(*there)
        args, there = then.after(args, expected), then.after(there, got)
        at = f"{where}, step {k + 1}"
        by_rounding = functools.partial(noise, plain, start, then.after, k + 1)
        decided |= _assert_same(
            snapshot(then.others(expected)),
            snapshot(_here(then.others(got))),
            f"{at}, results",
            tol=tol,
            moved=functools.partial(by_rounding, then.others),
        )
        decided |= _assert_same(
            snapshot(then.states(expected)),
            snapshot(close_static(_whole(sharded, then.states(got)))),
            f"{at}, state",
            tol=tol,
            ignore=ignore,
            weak_types=False,
            stored=_how_stored(sharded, then.states(got), then.returned),
            moved=functools.partial(by_rounding, then.states),
        )
    if decided:
        _warn(where, decided)


def assert_same(
    plain: Any,
    sharded: Any,
    where: str,
    *,
    tol: float = 1e-5,
    ignore: Sequence[str | re.Pattern[str]] = (),
    weak_types: bool = True,
    stored: dict[str, str] | None = None,
) -> None:
    """Asserts that two pytrees have the same structure, shapes, dtypes and values.

    Args:
      plain: pytree of arrays with the values as they should be.
      sharded: pytree of arrays with the values as they are.
      where: what is compared; the message begins with it.
      tol: largest norm of the difference of a floating-point leaf, relative to the
        leaf's norm; other leaves have to be equal to the bit.
      ignore: regular expressions, compiled or not, searched in the paths of leaves
        whose values are not compared.
      weak_types: whether weak types have to be the same too.
      stored: how a leaf is stored, by path, for the message.

    Returns:
      None.

    Raises:
      AssertionError: they differ; it describes the first leaf and names others.
    """
    check_same(tol, ignore, stored)
    plain, sharded = (
        x if isinstance(x, Snapshot) else snapshot(x) for x in (plain, sharded)
    )
    _assert_same(
        plain,
        sharded,
        where,
        tol=tol,
        ignore=ignore,
        weak_types=weak_types,
        stored=stored,
    )


def _assert_same(
    plain: Snapshot,
    sharded: Snapshot,
    where: str,
    *,
    tol: float,
    ignore: Sequence[str | re.Pattern[str]] = (),
    weak_types: bool = True,
    stored: dict[str, str] | None = None,
    moved: Callable[[Snapshot], Noise] = lambda plain: {},
) -> Noise:
    """`assert_same`, where leaves may differ by what rounding moves them: `moved` of
    the plain values, asked for only if leaves differ. Those that differ and that it
    decides come back: a leaf of zeros may be among them, and among no others."""
    found = list(differences(plain, sharded, tol, ignore, weak_types))
    if not found:
        return {}
    if plain.structure != sharded.structure:
        raise AssertionError(f"{where}: other pytree structure\n  {found[0].text}")
    rounding = moved(plain)
    decided = {path: by for path, by in rounding.items() if by > DECIDED_BY_ROUNDING}
    most = 2 * len(decided) > len(rounding)
    if not most:
        differ = {difference.path for difference in found}
        allowed = {path: ROUNDING_FACTOR * change for path, change in rounding.items()}
        found = list(differences(plain, sharded, tol, ignore, weak_types, allowed))
        if not found:
            return {path: by for path, by in decided.items() if path in differ}
    first, *others = found
    kept = f" stored {stored[first.path]}" if stored and first.path in stored else ""
    message = f"{where}, leaf {first.path or 'itself'} {first.text}{kept}"
    if others:
        names = ", ".join(d.path for d in others[:SHOWN_LEAVES])
        more = (
            f" and {len(others) - SHOWN_LEAVES} more"
            if len(others) > SHOWN_LEAVES
            else ""
        )
        message += f"\n  {len(found)} of {len(plain.leaves)} leaves differ, also: "
        message += names + more
    if first.path in rounding:
        message += _about_rounding(first.path, rounding[first.path], most, tol)
    raise AssertionError(message)


def _about_rounding(path: str, change: float, most: bool, tol: float) -> str:
    """Whether a difference may be noise, and what to do then."""
    text = (
        f"\n  rounding the arguments otherwise moves it by {change:.0e} on one device"
    )
    if most:
        return (
            f"{text}, and most leaves by more than {DECIDED_BY_ROUNDING}: such a step "
            "proves nothing. Take another state or batch, a smaller learning rate, or "
            "a model that computes in a wider dtype."
        )
    if ROUNDING_FACTOR * change > tol:
        return (
            f"{text}: it is rounding noise in part. A model that computes in a wider "
            "dtype, in float32 in place of bfloat16, has less; "
            f"ignore=[{re.escape(path)!r}] does not compare the leaf."
        )
    wide = "In float64 (jax_enable_x64) that of sums in another order is gone, too."
    return f"{text}: this is no noise of theirs. {wide}"


def _warn(where: str, decided: Noise) -> None:
    """Warns of leaves that differ and that rounding decides."""
    leaves = ", ".join(
        f"{path or 'itself'} (by {change:.0e})"
        for path, change in list(decided.items())[:SHOWN_LEAVES]
    )
    more = (
        f" and {len(decided) - SHOWN_LEAVES} more"
        if len(decided) > SHOWN_LEAVES
        else ""
    )
    warn(
        f"{where}: not compared, as rounding the arguments otherwise moves them on one "
        f"device: {leaves}{more}. All other leaves agree.\n"
        f"  assert_parity was called at {call_site()}\n"
        "Take another state or batch, or a model that computes in a wider dtype; or "
        "give patterns of these leaves as ignore.",
    )


def _check_names(options: Mapping[str, Any]) -> None:
    """Raises for a keyword that neither `assert_parity` nor `fully_shard` has."""
    own = ["steps", "tol", "ignore"]
    known = [*own, *Options.__annotations__]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            close = [k for k in own if name.startswith(k)] or close
            meant = f"Did you mean {close[0]}? " if close else ""
            raise TypeError(
                f"assert_parity has no argument {name!r}.\n"
                f"  assert_parity was called at {call_site()}\n"
                f"{meant}It takes {', '.join(own)} and the options of fully_shard."
            )


def _whole(step: ShardedStep, states: Any) -> Any:
    """Stored states put together: with several processes, on a device of each."""
    if len(processes.of(step.mesh.devices.flat)) == 1:
        return step.unshard(states)
    return step.storage.whole_on(None, (states,))[0]


def _here(results: Any) -> Any:
    """Results as this process can read them: those of several processes, whole."""
    return jax.tree.map(
        lambda x: x if getattr(x, "is_fully_addressable", True) else on_each(x), results
    )


def _next_arguments(step: ShardedStep, args: Sequence[Any]) -> NextArguments:
    meaning = step.meaning_of(*args)
    names = tuple(step.plain.name(place) for place in meaning.arguments)
    return NextArguments(meaning, names)


def _how_stored(step: ShardedStep, state: Any, argument: Any = None) -> dict[str, str]:
    storage, named = step.storage, step.storage.states_of(state, argument)
    each = storage.each(storage.leaves(named)[0]) if jax.tree.leaves(state) else ()
    return {leaf.name: show(s, storage.axes) for leaf, s in each}


def _assert_is_split(step: ShardedStep, stored: Any, where: str) -> None:
    axes = step.storage.axes
    if axes.sizes[axes.stored] == 1:
        return
    if all(how == "replicated" for how in _how_stored(step, stored).values()):
        raise AssertionError(
            f"{where}: every leaf of the state is whole on every device, so that "
            "nothing would be proved. Pass a smaller min_size, or a larger model."
        )
