"""The transform.

In: a plain training step. Out: the same step on a sharded state."""

import functools
import os
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from jax.sharding import Mesh

from shardfn import rules as rules  # fills the registry
from shardfn._api.call_arguments import state_names
from shardfn._api.compiled_steps import Programs
from shardfn._api.local_step import LocalStep
from shardfn._api.options import Options, shows_options
from shardfn._api.plain_step import PlainStep, Step
from shardfn._api.pmapped import unwrapped
from shardfn._api.predicted_latencies import Latencies
from shardfn._api.sharded_step import ShardedStep
from shardfn._api.stored_dimensions import stored_by_use
from shardfn._api.tuning.tuned_options import read
from shardfn._api.validate import (
    check_argnums,
    check_axis,
    check_example,
    check_flags,
    check_latencies,
    check_mesh,
    check_min_size,
    check_names,
    check_needs_no_mesh,
    check_step,
    check_verify,
)
from shardfn._core.control import make_control
from shardfn._core.errors import names_call
from shardfn._core.leaf_options import LeafOptions
from shardfn._lowering.xla_options import Asked, check_options
from shardfn.storage._mesh_context import automatic
from shardfn.storage._placement import Storage, axes_over

P = ParamSpec("P")
R = TypeVar("R")


class ToSharded(Protocol):
    """What `fully_shard(mesh=mesh)` returns."""

    def __call__(self, train_step: Callable[P, R], /) -> ShardedStep[P, R]:
        """The sharded step."""
        ...


class ToLocal(Protocol):
    """What `fully_shard(axis="data")` returns."""

    def __call__(self, train_step: Callable[P, R], /) -> LocalStep[P, R]:
        """The step on local shards."""
        ...


@overload
def fully_shard(
    train_step: Callable[P, R], mesh: Mesh, **options: Unpack[Options]
) -> ShardedStep[P, R]: ...


@overload
def fully_shard(
    train_step: Callable[P, R], mesh: None = None, **options: Unpack[Options]
) -> LocalStep[P, R]: ...


@overload
def fully_shard(
    train_step: None = None, *, mesh: Mesh, **options: Unpack[Options]
) -> ToSharded: ...


@overload
def fully_shard(
    train_step: None = None, mesh: None = None, **options: Unpack[Options]
) -> ToLocal: ...


@shows_options
@names_call
def fully_shard(
    train_step: Step | None = None,
    mesh: Mesh | None = None,
    *,
    axis: str | tuple[str, ...] = "data",
    min_size: int = 2**14,
    strict: bool = False,
    state_argnums: int | tuple[int, ...] | Literal["auto"] = "auto",
    batch_spec: Any = None,
    donate: bool = True,
    verify: str = "off",
    compiler_options: Asked = None,
    latencies: Latencies | None = None,
    options: str | os.PathLike[str] | None = None,
    shard_for: tuple[Any, ...] | None = None,
    **leaf_options: Unpack[LeafOptions],
) -> ShardedStep[..., Any] | LocalStep[..., Any] | Callable[[Step], Any]:
    """Shards `train_step`'s state over one mesh axis, gathering each parameter where it
    is used.

    Returns a function with the signature of `train_step` and the same results up to the
    order of floating-point sums. Per step each device sends about three times the
    parameters' bytes: two all-gathers (forward, backward) and one reduce-scatter of the
    gradients. Works as a decorator too: `@fully_shard(mesh=mesh)`.

    Args:
      train_step: pure function `(state, batch, ...) -> (state, ...)` written for one
        device. The new state has the structure, shapes and dtypes of the old one.
      mesh: device mesh with an axis called `axis`, of `n` devices. They may be devices
        that are not there; then only `lower` and `plan` work. Without a mesh the result
        is a `LocalStep`, for use inside the caller's own `jax.shard_map` or `jax.pmap`.
      axis: mesh axis to shard over, `"data"` by default. Of several, major to minor,
        the batch is split over all and parameters over the last; gradients are
        reduce-scattered over the last and then all-reduced over the others. Give two if
        only the devices of a host should gather from each other. Axes of the mesh that
        are not named are left to XLA: state that comes in split over them keeps that
        split.
      min_size: state leaves with fewer elements stay replicated, 16,384 by default. A
        larger one saves small gathers, whose latency counts; every device then holds
        more whole leaves.
      strict: raise when a primitive has no op sharding rule and would run on gathered
        operands. By default this is a warning, and the step runs.
      state_argnums: position of the state among the arguments, or positions: then as
        many results come first, or one state comes back alone; those like nothing that
        comes back are read only. `"auto"`, the default: the arguments that come back
        with their structure, shapes and dtypes, updated, wherever they stand among the
        arguments and the results; arguments that are like the state, or like a part of
        it, and trees that can be no batch, such as frozen weights, are stored like it
        and read only. Of a function
        that returns none, such as an evaluation, it is the first argument, or what
        arrives stored, and read only. Without a mesh, the first. `repr(step)` and the
        plan say which it is; give positions if that is not what you mean.
      batch_spec: how the other arguments are split: a pytree prefix of them (of the
        only other one, or a tuple of several; entries for arguments that are read only
        do not count) with a `PartitionSpec` or None per leaf. None, the default, splits
        dimension 0; scalars and PRNG keys are replicated, raw ones where the step makes
        random numbers from them as they are. Give specs to replicate a leaf, or to
        split another dimension, such as that of the sequence.
      donate: give the state's buffers to the new state, as by default; the old one
        cannot be used again. False: both are in memory at once.
      verify: hold what the compiler made against the plan (see `Plan.verify`), when the
        step is first compiled and for each new set of shapes. `"off"`, the default: no.
        `"warn"`: warn if it moves something else. `"error"`: refuse to run. It takes
        the time to read the compiled program, and nothing per step. Not where the step
        is called under another transform, whose program it is then a part of.
      compiler_options: options of XLA, a mapping from names to values, as in `jax.jit`.
        None, the default: on GPUs and TPUs some are set that make transfers run beside
        matmuls, if the installed compiler knows them; `step.compiler_options` shows
        which. One that is named here, in XLA_FLAGS or in LIBTPU_INIT_ARGS is the
        user's: its value here counts, and None leaves it to XLA. False: none is set.
        None of them counts where the step is called under another transform.
      latencies: whose figures XLA's scheduler for GPUs goes by when it puts transfers
        beside matmuls. `"xla"`, the default: its own, a fixed one for each kind of
        operation. `"predicted"`: the step is compiled, what each of its kernels and
        transfers takes is predicted from data sheets, and it is compiled again with
        that; it takes twice as long to compile. Worth it where the device waits for
        transfers between hosts: `step.on` says how long, and `shardfn.tune` tries it.
        It changes nothing on CPUs and TPUs, nor under another transform.
      options: path of a file that `python -m shardfn tune` or `Tuning.save` wrote; none
        by default. Its options count where none is given here, those of the compiler on
        the platform that they were chosen for. A step that has changed since is
        refused.
      shard_for: arguments of the step as an example, a tuple of arrays or
        `ShapeDtypeStruct`s; none by default. Leaves of the state are then stored on the
        dimensions with which the step sends least for them, as `best_dimensions` finds,
        where few rows meet large leaves; those of which `shard` says something, as it
        says. Give it for decoding and other small batches. The same arguments give the
        same dimensions, on every process. It takes the time of some plans, and nothing
        per step.
      **leaf_options: the options that may differ from leaf to leaf, a row each of
        `LeafOptions`; `help(fully_shard)` has their text here.

    The options from `reshard_after_forward` on may differ from leaf to leaf of the
    state. They take one value, or a mapping from path patterns to values, of which the
    first that matches counts: `{"params/head": False, "*": True}`. A pattern names
    leaves or subtrees of the state by their paths as the plan prints them; `*` stands
    for any characters. Leaves that none matches take the default.

    Returns:
      A jitted `ShardedStep`, or a `LocalStep` without a mesh. Arrays in `batch` have
      shape `[B, ...]`; scalar results are replicated, per-example results split like
      the batch.

    Raises:
      ShardingError: `mesh` has no axis `axis`; an option has no such value;
        `train_step` is sharded already; or `verify`, `compiler_options` or `latencies`
        is given without a mesh.

    Example:
      >>> import jax, jax.numpy as jnp, shardfn
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> @shardfn.fully_shard(mesh=mesh, min_size=0)
      ... def train_step(w, x):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      ...     return w - 0.1 * grad, loss
      >>> w = train_step.init(lambda: jnp.ones((16, 16)))
      >>> w, loss = train_step(w, jnp.ones((8, 16)))
      >>> loss.item()
      256.0

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054); Zhao et al., PyTorch FSDP
      (arXiv:2304.11277).
    """
    tuned = None if options is None else read(options)
    if tuned is not None:
        leaf_options = {**tuned.of_leaves(), **leaf_options}  # pyright: ignore
    given: Options = {
        "axis": axis,
        "min_size": min_size,
        "strict": strict,
        "state_argnums": state_argnums,
        "batch_spec": batch_spec,
        "donate": donate,
        "verify": verify,
        "compiler_options": compiler_options,
        "latencies": latencies,
        "options": options,
        "shard_for": shard_for,
        **leaf_options,
    }
    names, argnums = check_axis(axis), check_argnums(state_argnums)
    control = make_control(mesh_axes=names, **leaf_options)
    min_size = check_min_size(min_size)
    control.check_axes(names)
    check_mesh(mesh)
    check_flags(strict=strict, donate=donate)
    check_example(shard_for)
    check_verify(verify)
    asked = check_options(compiler_options)
    if latencies is None and tuned is not None:
        latencies = tuned.latencies
    check_latencies(latencies)
    if train_step is None:
        return functools.partial(fully_shard, mesh=mesh, **given)
    check_step(train_step)
    inner, batch_spec = unwrapped(train_step, names, argnums or (0,), batch_spec)
    if inner is not train_step:  # its in_axes are split by position
        argnums = argnums or (0,)
    plain = PlainStep(inner, min_size, strict, argnums, batch_spec, control, tuned)
    if mesh is None:
        check_needs_no_mesh(given, control)
        local = LocalStep(plain, names, given)
        functools.update_wrapper(local, inner, updated=())
        return local
    check_names(names, mesh)
    axes = axes_over(mesh, names, control)
    known = state_names(inner, argnums)
    storage = Storage(automatic(mesh), mesh, axes, min_size, control, names=known)
    programs = Programs(plain, storage, donate, asked, latencies or "xla")
    step = ShardedStep(programs, verify)
    functools.update_wrapper(step, inner, updated=())
    if shard_for is None:
        return step
    by_use = stored_by_use(leaf_options.get("shard"), step.best_dimensions(*shard_for))
    stored: Any = {**given, "shard_for": None, **by_use}
    return fully_shard(train_step, mesh, **stored)
