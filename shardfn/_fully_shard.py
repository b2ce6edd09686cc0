"""The transform: a plain training step in, the same step on a sharded state out."""

import functools
from collections.abc import Callable
from typing import Any, overload

from jax.sharding import Mesh

from shardfn import _rules as _rules  # fills the registry
from shardfn._errors import ShardingError, call_site
from shardfn._local_step import LocalStep
from shardfn._plain_step import PlainStep, Step
from shardfn._sharded_step import ShardedStep
from shardfn._sharding import Axes
from shardfn._storage import Storage, automatic


@overload
def fully_shard(
    train_step: Step,
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...] = ...,
    min_size: int = ...,
    strict: bool = ...,
    state_argnums: int | tuple[int, ...] = ...,
    batch_spec: Any = ...,
    donate: bool = ...,
) -> ShardedStep: ...


@overload
def fully_shard(
    train_step: Step,
    mesh: None = None,
    *,
    axis: str | tuple[str, ...] = ...,
    min_size: int = ...,
    strict: bool = ...,
    state_argnums: int | tuple[int, ...] = ...,
    batch_spec: Any = ...,
    donate: bool = ...,
) -> LocalStep: ...


@overload
def fully_shard(
    train_step: None = None,
    mesh: Mesh | None = None,
    *,
    axis: str | tuple[str, ...] = ...,
    min_size: int = ...,
    strict: bool = ...,
    state_argnums: int | tuple[int, ...] = ...,
    batch_spec: Any = ...,
    donate: bool = ...,
) -> Callable[[Step], Any]: ...


def fully_shard(
    train_step: Step | None = None,
    mesh: Mesh | None = None,
    *,
    axis: str | tuple[str, ...] = "data",
    min_size: int = 2**14,
    strict: bool = False,
    state_argnums: int | tuple[int, ...] = 0,
    batch_spec: Any = None,
    donate: bool = True,
) -> ShardedStep | LocalStep | Callable[[Step], Any]:
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
        the last and then all-reduced over the others.
      min_size: state leaves with fewer elements stay replicated.
      strict: raise instead of warning when a primitive has no op sharding rule and
        would run on gathered operands.
      state_argnums: position of the state among the arguments, or positions: then as
        many results come first.
      batch_spec: pytree prefix of the other arguments (of the only other one, or a
        tuple of several) with a `PartitionSpec` or None per leaf. None splits dimension
        0; scalars and PRNG keys are replicated.
      donate: give the state's buffers to the new state; the old one cannot be used
        again.

    Returns:
      A jitted `ShardedStep`, or a `LocalStep` without a mesh. Arrays in `batch` have
      shape `[B, ...]`; scalar results are replicated, per-example results split like
      the batch.

    Raises:
      ShardingError: `mesh` has no axis `axis`.

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
    options = dict(
        axis=axis,
        min_size=min_size,
        strict=strict,
        state_argnums=state_argnums,
        batch_spec=batch_spec,
        donate=donate,
    )
    if train_step is None:
        return functools.partial(fully_shard, mesh=mesh, **options)
    names = (axis,) if isinstance(axis, str) else tuple(axis)
    argnums = (state_argnums,) if isinstance(state_argnums, int) else state_argnums
    plain = PlainStep(train_step, min_size, strict, tuple(argnums), batch_spec)
    if mesh is None:
        local = LocalStep(plain, names)
        functools.update_wrapper(local, train_step, updated=())
        return local
    for name in names:
        if names.count(name) > 1:
            raise ShardingError(
                f"axis={names} names mesh axis '{name}' twice.\n"
                f"  fully_shard was called at {call_site()}\n"
                "Name each mesh axis once, major to minor."
            )
        if name not in mesh.shape:
            raise ShardingError(
                f"the mesh has no axis '{name}'; its axes are {tuple(mesh.shape)}.\n"
                f"  fully_shard was called at {call_site()}\n"
                f"Pass axis={tuple(mesh.shape)[0]!r}, or make the mesh with "
                f"jax.make_mesh(({mesh.size},), ({name!r},))."
            )
    axes = Axes(names, tuple(mesh.shape[n] for n in names))
    storage = Storage(automatic(mesh), mesh, axes, min_size)
    step = ShardedStep(plain, storage, donate)
    functools.update_wrapper(step, train_step, updated=())
    return step
