"""The compiler options of a step.

In: its devices, what it does, and what the user asked for or set elsewhere.
Out: options for `jax.jit(compiler_options=)` that this compiler knows.
"""

import functools
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from shardfn._core import compat, processes
from shardfn._core.device_coords import slices_of
from shardfn._core.errors import ShardingError, called, cannot_be
from shardfn._lowering.option_table import OPTIONS, TRIED, CompilerOption, Flags

Asked = Mapping[str, Any] | Literal[False] | None
"""`compiler_options` as users write it."""

_INVALID = "INVALID_ARGUMENT: "
_VALUES = (str, int, float, bool, type(None))

_GPUS = ("gpu", "cuda", "rocm")


def device_and_platform(devices: Sequence[Any]) -> tuple[Any, str]:
    """One of these devices, and their platform, "gpu" for all GPUs."""
    device = processes.reachable(devices)
    return device, "gpu" if device.platform in _GPUS else device.platform


def tried(devices: Sequence[Any], name: str) -> dict[str, Any]:
    """The options of one row of `TRIED`, as the compiler of these devices spells them;
    nothing if it is another platform's, or does not know one of them."""
    device, platform = device_and_platform(devices)
    rows = [option for option in TRIED[name] if option.is_for(device, platform)]
    known = _known(device, rows) if rows else {}
    return known if len(known) == len(rows) else {}


def check_options(asked: Any) -> Asked:
    """Raises if `compiler_options` is nothing that can be asked."""
    if asked is None or asked is False:
        return asked
    if isinstance(asked, Mapping) and all(
        isinstance(name, str) and isinstance(value, _VALUES)
        for name, value in asked.items()
    ):
        return dict(asked)
    cannot_be(
        "compiler_options",
        asked,
        "Pass a mapping from names of XLA's options to strings, numbers or booleans, "
        "with None for an option that XLA shall choose; False to set none at all; or "
        "None.",
    )


def compiler_options(
    devices: Sequence[Any],
    asked: Asked,
    quantizes: bool = False,
    in_turn: bool = False,
    on_host: bool = False,
    other_axes: bool = False,
) -> dict[str, Any]:
    """The options that a step is compiled with.

    Args:
      devices: those of the mesh; they may be devices that are not there.
      asked: what the user said; see `fully_shard`.
      quantizes: whether leaves may be gathered quantized.
      in_turn: whether the plan orders gathers.
      on_host: whether it has values in the host's memory.
      other_axes: whether its loops sum over other mesh axes what they scatter over one.

    Returns:
      Names and values, all known to the compiler of these devices.

    Raises:
      ShardingError: the user names an option that it does not know, or a value that the
        option does not take.
    """
    device, platform = device_and_platform(devices)
    given = dict(asked or {})
    named = {name: value for name, value in given.items() if value is not None}
    given_by_user = {*given, *set_elsewhere()}
    left_to_xla = given.keys() - named.keys()
    of_use = [
        option
        for option in OPTIONS
        if option.is_for(device, platform)
        and (not option.slices or slices_of(devices) > 1)
        and (not option.most or len(devices) <= option.most)
        and (quantizes or not option.quantized)
        and (in_turn or not option.in_turn)
        and (on_host or not option.on_host)
        and (other_axes or not option.other_axes)
        and given_by_user.isdisjoint(option.decided_by)
        and (left_to_xla if option.is_list else given_by_user).isdisjoint(option.names)
    ]
    ours = [_behind(option, named) if option.is_list else option for option in of_use]
    if named and (refused := refusal(device, _frozen(named))):
        raise ShardingError(
            f"compiler_options names an option or a value that the compiler of "
            f"{device.device_kind} does not know: {refused}.\n{called()}"
            "Correct it, or leave it out."
        )
    if asked is False:
        return {}
    known = _known(device, ours)
    joined = {name for option in of_use if option.is_list for name in option.names}
    alone = named.keys() - (joined & known.keys())
    return known | {name: named[name] for name in named if name in alone}


def needed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a step's options that results depend on, and that nothing outside of
    this package sets."""
    ours = {pair for option in OPTIONS if option.is_list for pair in option.spellings}
    elsewhere = _flags_elsewhere()
    return {
        name: options[name]
        for name, value in ours
        if name in options and value not in elsewhere.get(name, "").split(",")
    }


def _behind(option: CompilerOption, named: Mapping[str, Any]) -> CompilerOption:
    """An option whose value is a list, with the user's entries in front."""
    before = {**_flags_elsewhere(), **named}

    def joined(name: str, value: Any) -> tuple[str, Any]:
        given = [entry for entry in str(before.get(name, "")).split(",") if entry]
        return name, ",".join(dict.fromkeys([*given, value]))

    spellings = tuple(joined(name, value) for name, value in option.spellings)
    return replace(option, spellings=spellings)


def set_elsewhere() -> set[str]:
    """Names of the options that the user set outside of this package: in XLA_FLAGS, or
    the file that it names, in LIBTPU_INIT_ARGS, and in JAX's own settings."""
    found = list(_flags_elsewhere())
    found += [name[2:] for name in found if name.startswith("no")]
    return {*found, *compat.compiler_settings()}


def elsewhere_key() -> Hashable:
    """The same with their values, as a key."""
    return frozenset(_flags_elsewhere().items()), frozenset(compat.compiler_settings())


def _flags_elsewhere() -> dict[str, str]:
    """The flags of both environment variables, and what they are set to."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-") and Path(flags).is_file():
        flags = Path(flags).read_text()
    flags += " " + os.environ.get("LIBTPU_INIT_ARGS", "")
    found = re.findall(r"--(\w+)(?:=(\S+))?", flags)
    return {name: value.strip("\"'") for name, value in found}


def _known(device: Any, options: Iterable[CompilerOption]) -> dict[str, Any]:
    """The options in the spelling that the compiler knows, without those it does not
    know in any."""
    each = [list(option.spellings) for option in options]
    while each:
        now = dict(spellings[0] for spellings in each)
        refused = refusal(device, _frozen(now))
        if not refused:
            return now
        left = [s[1:] if re.search(rf"\b{s[0][0]}\b", refused) else s for s in each]
        if left == each:  # it names none of them
            return _one_by_one(device, each)
        each = [spellings for spellings in left if spellings]
    return {}


def _one_by_one(device: Any, each: Iterable[Iterable[Any]]) -> dict[str, Any]:
    """The options, of which each has these spellings, that the compiler takes with
    those before; none in a trouble that is not of any, which the step meets, too."""
    found: dict[str, Any] = {}
    for spellings in each:
        more = (found | {name: value} for name, value in spellings)
        found = next((x for x in more if not refusal(device, _frozen(x))), found)
    return found


def refusal(device: Any, options: Flags) -> str:
    """Why the compiler of `device` does not take these options, or `""`: tried on a
    program that returns zero. Troubles of another kind, such as no memory, are raised;
    they may have passed the next time."""
    # True is 1 in Python, and not to a compiler.
    return _tried(device, options, tuple(type(value) for _, value in options))


@functools.cache
def _tried(device: Any, options: Flags, kinds: tuple[type, ...]) -> str:
    one = jax.sharding.SingleDeviceSharding(device)
    with compat.at_top_level():
        lowered = jax.jit(lambda: jax.numpy.float32(0), out_shardings=one).lower()
    try:
        lowered.compile(compiler_options=dict(options))
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        refused = first.startswith(_INVALID) or "No such compile option" in first
        if isinstance(error, jax.errors.JaxRuntimeError) and not refused:
            raise
        return first.removeprefix(_INVALID).rstrip(".")
    return ""


def _frozen(options: Mapping[str, Any]) -> Flags:
    return tuple(sorted(options.items()))
