"""The devices of a run, and how the step gets onto them: the only file that shards."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from config import Config
from data import Batch, Share
from jax.sharding import NamedSharding, PartitionSpec
from step import create_state, eval_step, train_step

import shardfn


def start(config: Config) -> None:
    """Makes CPU devices if told to, and joins the other processes if there are any;
    works only before JAX's first computation."""
    if config.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.devices)
    if not config.coordinator:
        return
    heartbeat = {"heartbeat_timeout_seconds": config.heartbeat_seconds}
    if config.coordinator == "auto":
        jax.distributed.initialize(**heartbeat)
    else:
        jax.distributed.initialize(
            *(config.coordinator, config.process_count, config.process_id), **heartbeat
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """The steps of a run on its devices, and what makes a state for them."""

    train: Callable[..., Any]
    evaluate: Callable[..., Any]
    init: Callable[[], Any]
    place: Callable[[Batch], Any]
    share: Share
    abstract_state: Any

    def feed(self, batches: Iterable[Batch]) -> Iterator[Any]:
        return map(self.place, batches)


def creator(config: Config) -> Callable[[jax.Array], Any]:
    """Returns the function from a key to a new state."""
    return functools.partial(
        create_state,
        model=config.model,
        optimizer=config.optimizer,
        steps=config.steps,
    )


def abstract_state(config: Config) -> Any:
    return jax.eval_shape(creator(config), jax.random.key(config.seed))


def prepare(config: Config) -> Machine:
    make, key = creator(config), jax.random.key(config.seed)
    abstract = abstract_state(config)
    if config.plain:
        return Machine(
            jax.jit(train_step, donate_argnums=0),
            jax.jit(eval_step, donate_argnums=0),
            lambda: jax.jit(make)(key),
            lambda batch: batch,
            Share(config.batch_size),
            abstract,
        )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train = shardfn.fully_shard(train_step, mesh)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def place(batch: Batch) -> Any:
        # With one process the step places a batch itself, and checks it.
        if jax.process_count() == 1:
            return batch
        return {
            name: jax.make_array_from_process_local_data(rows, np.asarray(x))
            for name, x in batch.items()
        }

    return Machine(
        train,
        shardfn.fully_shard(eval_step, mesh),
        lambda: train.init(make, key),
        place,
        Share(config.batch_size, jax.process_index(), jax.process_count()),
        abstract,
    )
