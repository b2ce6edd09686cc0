"""The devices of a run, and how the step gets onto them: the only file that shards."""

import dataclasses
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from config import Config, ConfigError
from data import Batch, Share
from jax.sharding import NamedSharding, PartitionSpec
from step import create_state, eval_step, train_step

import shardfn

JAX_WAITS = 600
"""Seconds after which JAX would end the process, without a message."""


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
        return
    if config.process_id:
        wait_for_first(config.coordinator, config.join_seconds)
    else:
        print(
            f"waits for {config.process_count - 1} other processes to join at "
            f"{config.coordinator}, at most {config.join_seconds} s",
            flush=True,
        )
    gives_up = threading.Timer(config.join_seconds, give_up, [config])
    gives_up.daemon = True
    gives_up.start()
    jax.distributed.initialize(
        *(config.coordinator, config.process_count, config.process_id),
        initialization_timeout=JAX_WAITS,
        **heartbeat,
    )
    gives_up.cancel()


def give_up(config: Config) -> None:
    """Ends this process: JAX waits where nothing can be raised."""
    print(
        f"error: not all of --process-count {config.process_count} have joined at "
        f"{config.coordinator} in {config.join_seconds} s. Check that all run with "
        "that --coordinator, each with a --process-id of its own, or give more "
        "--join-seconds.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def wait_for_first(address: str, seconds: float) -> None:
    """Waits until process 0 listens: JAX aborts the process if it never does."""
    host, _, port = address.rpartition(":")
    since = time.monotonic()
    is_said = False
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            problem = f"process 0 cannot be reached at {address} ({error.strerror})"
        if time.monotonic() > since + seconds:
            raise ConfigError(f"{problem}: check --coordinator, and that it runs.")
        if not is_said:
            print(f"{problem}; waits for it, at most {seconds} s", flush=True)
            is_said = True
        time.sleep(0.5)


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
            jax.jit(eval_step),
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
