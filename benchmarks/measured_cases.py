"""Names in; the programs that `measured.py` runs on a GPU, lowered, out."""

import functools
from collections.abc import Sequence
from typing import Any

import criteria_programs as programs
import jax
import numpy as np
import scaling_models
from criteria_cases import CASES, GPT_1B, Model
from jax.sharding import AxisType, Mesh
from scaling import BERT

import shardfn

RESNET, RESNET_ROWS = "resnet-50", 128
ONE = {
    "gpt-1.3b": GPT_1B,
    "llama-1b": Model(
        *("llama", 16, 2048, 32, 64, 8192, 128256, 2048), rows=4, kv_heads=8
    ),
    "bert-large": BERT,
}
"""Models on one GPU. The Llama has the sizes of 3.2 1B."""
MANY = ("gpt-1.3b-8", "llama-7b-64", "gpt-175b-128", "t5-11b-8", "t5-11b-512")
"""Cases of `criteria.py`."""
NAMES = (*ONE, RESNET, *MANY)
TINY = {"tiny": Model("gpt", 2, 128, 2, 64, 512, 512, 16, rows=1)}
"""Tries the script out, on CPUs, too."""
JIT, OURS, CONSTRAINED, BY_HAND = "jit", "shardfn", "constrained", "shard_map by hand"


def devices_of(case: str) -> int:
    """How many devices a case's program is for."""
    return CASES[case].devices if case in CASES else 1


def programs_of(case: str) -> tuple[str, ...]:
    """The names of a case's programs, that of this library first."""
    return (OURS, JIT) if devices_of(case) == 1 else (OURS, CONSTRAINED, BY_HAND)


def lowered_program(case: str, program: str, devices: Sequence[Any]) -> tuple[Any, Any]:
    """A program, lowered for these devices, and its state as shapes."""
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    if case == RESNET:
        step: Any = scaling_models.resnet_step
        state, batch = scaling_models.resnet_arguments(RESNET_ROWS)
    else:
        model = CASES[case].model if case in CASES else {**ONE, **TINY}[case]
        state, batch = programs.arguments(model, mesh.size)
        if program == CONSTRAINED:
            return programs.constrained(model, mesh), state
        if program == BY_HAND:
            return programs.by_hand(model, mesh), state
        step = functools.partial(programs.train_step, model=model)
        functools.update_wrapper(step, programs.train_step)
    if program == JIT:
        return jax.jit(step, donate_argnums=0).lower(state, batch), state
    return shardfn.fully_shard(step, mesh).lower(state, batch), state
