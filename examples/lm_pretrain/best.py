"""The state with the lowest loss on held-out text: in `best` of a run's folder.

In: a run's folder, and the losses as they are measured. Out: one checkpoint.
"""

import math
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from shardfn.storage.checkpoint import CheckpointError, Checkpoints

FOLDER = "best"


class Best:
    """The best checkpoint of a run; one of a step that is taken anew does not count.

    Attributes:
      loss: of that checkpoint, in nats per token; infinite if there is none.
    """

    def __init__(self, run: Path, step: Any, done: int):
        self.folder = run / FOLDER
        self.options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self.step = step
        self.loss = self.open(done)

    def open(self, done: int) -> float:
        try:
            self.checkpoints = Checkpoints(self.folder, self.step, options=self.options)
            number = self.checkpoints.latest
            if number is None:
                return math.inf
            if number <= done:
                return float(self.checkpoints.extra(number)["loss"])
            reason = f"of step {number}, which is taken anew"
            self.checkpoints.close()
        except (CheckpointError, KeyError) as error:
            reason = f"not to be read ({error})"
        self.drop(reason)
        return self.open(done)

    def drop(self, reason: str) -> None:
        if jax.process_index() == 0:
            print(f"{self.folder}: removed, it is {reason}", flush=True)
            shutil.rmtree(self.folder)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"{FOLDER} was removed")

    def add(self, number: int, state: Any, loss: float) -> None:
        """Starts to write the state of a step, if no loss was lower."""
        if loss < self.loss:
            self.checkpoints.save(number, state, {"loss": loss})
            self.loss = loss
