"""The transform: a plain training step in, the same step on a sharded state out."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from jax.sharding import Mesh
from jax.typing import DTypeLike

from shardfn import rules as rules  # fills the registry
from shardfn._api.compiled_steps import Programs
from shardfn._api.local_step import LocalStep
from shardfn._api.plain_step import PlainStep, Step
from shardfn._api.pmapped import unwrapped
from shardfn._api.sharded_step import ShardedStep
from shardfn._api.validate import (
    check_argnums,
    check_axis,
    check_flags,
    check_mesh,
    check_min_size,
    check_step,
    check_verify,
)
from shardfn._core.errors import ShardingError, call_site
from shardfn._core.leaf_options import Accumulate, PerLeaf, Reshard, make_control
from shardfn._lowering.xla_options import Asked, check_options
from shardfn.storage._mesh_context import automatic
from shardfn.storage._placement import Storage, axes_over

Made = TypeVar("Made", bound=Callable[..., Any])
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


class PerLeafOptions(TypedDict, total=False):
    """The options of `fully_shard` that may differ from leaf to leaf of the state."""

    reshard_after_forward: PerLeaf[Reshard]
    gather_dtype: PerLeaf[DTypeLike | None]
    reduce_dtype: PerLeaf[DTypeLike | None]
    accumulate: PerLeaf[Accumulate]
    prefetch: PerLeaf[int]
    bucket_bytes: PerLeaf[int]
    shard: PerLeaf[str | tuple[str, ...] | Literal[False] | None]
    per_device_state: Sequence[str]


class Options(PerLeafOptions, total=False):
    """The options of `fully_shard`; its docstring says what they are."""

    axis: str | tuple[str, ...]
    min_size: int
    strict: bool
    state_argnums: int | tuple[int, ...] | Literal["auto"]
    batch_spec: Any
    donate: bool
    verify: str
    compiler_options: Asked


def _knows_options(transform: Made) -> Made:
    """Makes `fully_shard` say which option a misspelled one may be."""
    known = list(inspect.signature(transform).parameters)

    @functools.wraps(transform)
    def with_options(*args: Any, **options: Any) -> Any:
        for option in options:
            if option not in known:
                close = difflib.get_close_matches(option, known, n=1)
                advice = f"Its options are {', '.join(known[1:])}."
                if close:
                    advice = f"Did you mean {close[0]}=...? {advice}"
                raise ShardingError(
                    f"fully_shard has no option '{option}'.\n"
                    f"  fully_shard was called at {call_site()}\n{advice}"
                )
        return transform(*args, **options)

    return with_options  # pyright: ignore[reportReturnType]


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


@_knows_options
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
    reshard_after_forward: PerLeaf[Reshard] = "auto",
    gather_dtype: PerLeaf[DTypeLike | None] = None,
    reduce_dtype: PerLeaf[DTypeLike | None] = None,
    accumulate: PerLeaf[Accumulate] = "auto",
    prefetch: PerLeaf[int] = 0,
    bucket_bytes: PerLeaf[int] = 0,
    shard: PerLeaf[str | tuple[str, ...] | Literal[False] | None] = None,
    per_device_state: Sequence[str] = (),
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
      axis: mesh axis to shard over, or several, major to minor: the batch is split over
        all of them, parameters over the last, and gradients are reduce-scattered over
        the last and then all-reduced over the others. Other axes of the mesh are left
        to XLA: state that comes in split over them keeps that split.
      min_size: state leaves with fewer elements stay replicated.
      strict: raise instead of warning when a primitive has no op sharding rule and
        would run on gathered operands.
      state_argnums: position of the state among the arguments, or positions: then as
        many results come first. "auto": the arguments that come back with their
        structure, shapes and dtypes, updated, wherever they stand among the arguments
        and the results; `repr(step)` and the plan say which. Without a mesh, the first.
      batch_spec: pytree prefix of the other arguments (of the only other one, or a
        tuple of several) with a `PartitionSpec` or None per leaf. None splits dimension
        0; scalars and PRNG keys are replicated, raw ones where the step makes random
        numbers from them as they are.
      donate: give the state's buffers to the new state; the old one cannot be used
        again.
      verify: `"error"` or `"warn"`: when the step is first compiled, and for each new
        set of shapes, hold what the compiler made against the plan and refuse to run,
        or warn, if it moves something else (see `Plan.verify`). Takes the time to read
        the compiled program, and nothing per step. Not where the step is called under
        another transform, whose program it is then a part of.
      compiler_options: what XLA is told besides, a mapping from names of its options to
        values, as in `jax.jit`. On GPUs and TPUs some are set that make transfers run
        beside matmuls, if the installed compiler knows them; `step.compiler_options`
        shows which. One that is named here, in XLA_FLAGS or in LIBTPU_INIT_ARGS is the
        user's: its value here counts, and None leaves it to XLA. False: none is set.
        None of them counts where the step is called under another transform.
      reshard_after_forward: whether the backward pass gathers a parameter again. True:
        yes; twice its bytes are gathered, and it is whole only while a layer uses it.
        False: what the forward pass gathered is kept; half the bytes, and all such
        parameters are whole at the end of the forward pass (a scan over layers stacks
        them). A number `k` that divides the devices of the axis: each device keeps a
        `k`-th, and the backward pass gathers within groups of `k` neighbours, such as
        those of one host: `(k-1)/k` of a parameter's bytes, over their links alone, and
        a `k`-th of all such parameters in memory between the passes. "auto": only if
        more than its own bytes are gathered between the two uses, so not for the last
        layer or the head; and within one pass, such as for a table that is tied to the
        head, only if what is kept would be more than a tenth of them.
      gather_dtype: floating-point dtype that parameters are cast to before they are
        gathered, and back behind it: bfloat16 halves the bytes of a step in float32,
        and rounds the weights that it multiplies with. Parameters that the step itself
        casts to this or a narrower dtype are not touched. None: as the step has them.
      reduce_dtype: floating-point dtype that gradients are summed over devices in. With
        float32, gradients that the step makes in bfloat16 leave their matrix product as
        float32 and are rounded after the sum, if at all: twice the bytes of a
        reduce-scatter. A narrower one than the step's halves them and rounds each
        device's term. None: as the step makes them.
      accumulate: how a scan that adds up a gradient, such as one over microbatches,
        holds it. "scatter": each iteration reduce-scatters its gradient and adds it to
        a shard; the shards are all-reduced over other mesh axes once, after the scan.
        "defer": each device adds up its own gradients, as large as the
        parameter, and they are reduce-scattered once: for `k` microbatches a `k`-th of
        the bytes. "auto": deferred if all gradients of the scan together fit in 64 MiB.
      prefetch: how many layers ahead a scan over layers gathers, forward and backward.
        The loop carries the coming layers' gathered weights, so that their gathers can
        run while a layer computes, for as many layers' weights of memory and as many
        more gathers of a layer per pass, whose results the last iterations drop. 0:
        each iteration gathers its own, and the compiler overlaps what it can. In
        unrolled layers it is a bound, which takes no further gathers: at most so many
        layers' weights, or without `jax.checkpoint` so many weights, are gathered or in
        flight beside those in use; 0 bounds nothing.
      bucket_bytes: small leaves that a layer gathers, or whose gradients it sums, move
        together, in one collective of at most so many bytes of whole values; larger
        ones travel alone, and are not copied. Fewer collectives for the same bytes and
        the same results to the last bit, but joined leaves are copied once more on
        either side, and the first gathers and the last sums wait for the others. Leaves
        with different values of it, or in different dtypes, do not move together, nor
        those that other mesh axes split. 0: each leaf has a collective of its own,
        which XLA may still combine.
      shard: mesh axes over which leaves of the state are stored split, one dimension
        per axis. None: the last of `axis`; parameters, gradients and optimizer state
        are then all sharded (ZeRO-3; hybrid if `axis` has more). False: every device
        holds the whole leaf. `{"params": False}` shards only the optimizer state: no
        gather in forward and backward, gradients are reduce-scattered, and new
        parameters all-gathered in their stored dtype (ZeRO-2, and with
        `accumulate="defer"` ZeRO-1). `{"params": "data", "opt_state": ("replica",
        "data")}` gathers over the one axis and updates over both. `False` alone
        all-reduces whole gradients.
      per_device_state: path patterns of leaves that each device keeps for itself, as
        under `jax.pmap`: batch statistics of a step that is written per device and does
        not average them. They have a leading dimension of devices, which `init` and
        `shard` add and the step does not see.

    The options from `reshard_after_forward` to `shard` take one value, or a mapping
    from path patterns to values, of which the first that matches counts:
    `{"params/head": False, "*": True}`. A pattern names leaves or subtrees of the state
    by their paths as the plan prints them; `*` stands for any characters. Leaves that
    none matches take the default.

    Returns:
      A jitted `ShardedStep`, or a `LocalStep` without a mesh. Arrays in `batch` have
      shape `[B, ...]`; scalar results are replicated, per-example results split like
      the batch.

    Raises:
      ShardingError: `mesh` has no axis `axis`; an option has no such value;
        `train_step` is sharded already; or `verify` or `compiler_options` is given
        without a mesh.

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
    per_leaf: PerLeafOptions = {
        "reshard_after_forward": reshard_after_forward,
        "gather_dtype": gather_dtype,
        "reduce_dtype": reduce_dtype,
        "accumulate": accumulate,
        "prefetch": prefetch,
        "bucket_bytes": bucket_bytes,
        "shard": shard,
        "per_device_state": per_device_state,
    }
    options: Options = {
        "axis": axis,
        "min_size": min_size,
        "strict": strict,
        "state_argnums": state_argnums,
        "batch_spec": batch_spec,
        "donate": donate,
        "verify": verify,
        "compiler_options": compiler_options,
        **per_leaf,
    }
    control = make_control(**per_leaf)
    names, argnums = check_axis(axis), check_argnums(state_argnums)
    min_size = check_min_size(min_size)
    control.check_axes(names)
    check_mesh(mesh)
    check_flags(strict=strict, donate=donate)
    check_verify(verify)
    asked = check_options(compiler_options)
    if train_step is None:
        return functools.partial(fully_shard, mesh=mesh, **options)
    check_step(train_step)
    inner, batch_spec = unwrapped(train_step, names, argnums or (0,), batch_spec)
    if inner is not train_step:  # its in_axes are split by position
        argnums = argnums or (0,)
    plain = PlainStep(inner, min_size, strict, argnums, batch_spec, control)
    if mesh is None:
        needs_none = {"verify": verify == "off", "compiler_options": asked is None}
        for option, is_default in needs_none.items():
            if not is_default:
                raise ShardingError(
                    f"{option}={options[option]!r} needs a mesh: without one the step "
                    "becomes part of a program that the caller compiles.\n"
                    f"  fully_shard was called at {call_site()}\n"
                    "Pass a mesh, or leave it out and say it of the whole program, "
                    "with plan.verify(compiled) or jax.jit(..., compiler_options=...)."
                )
        for group in sorted(control.groups):
            raise ShardingError(
                f"reshard_after_forward={group} needs a mesh, whose axis it divides "
                "into groups: one that the caller has bound stays in one piece.\n"
                f"  fully_shard was called at {call_site()}\n"
                "Pass a mesh, or True or False."
            )
        if control.has_per_device_state:
            raise ShardingError(
                f"per_device_state={tuple(per_device_state)!r} needs a mesh: without "
                "one the step sees what one device holds, and nothing else.\n"
                f"  fully_shard was called at {call_site()}\n"
                "Pass a mesh, or keep such leaves out of the state."
            )
        local = LocalStep(plain, names, options)
        functools.update_wrapper(local, inner, updated=())
        return local
    for name in names:
        if name not in mesh.shape:
            raise ShardingError(
                f"the mesh has no axis '{name}'; its axes are {tuple(mesh.shape)}.\n"
                f"  fully_shard was called at {call_site()}\n"
                f"Pass axis={tuple(mesh.shape)[0]!r}, or make the mesh with "
                f"jax.make_mesh(({mesh.size},), ({name!r},))."
            )
    axes = axes_over(mesh, names, control)
    storage = Storage(automatic(mesh), mesh, axes, min_size, control)
    step = ShardedStep(Programs(plain, storage, donate, asked), verify)
    functools.update_wrapper(step, inner, updated=())
    return step
