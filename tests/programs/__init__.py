"""Plain training steps written for one device, and nothing else: no program here
imports shardfn. `names()` lists them, `get(name)` builds one.
"""

from . import (  # noqa: F401  fills the registry
    autodiff,
    batchwise,
    conv,
    decode,
    dropout,
    experts,
    generative,
    gpt,
    leaves,
    libraries,
    linear_algebra,
    llama,
    mlp,
    optimizers,
    policies,
    recurrent,
    sizes,
    states,
    steps,
    transformers,
)
from ._program import Noisy as Noisy, Program as Program, get as get, names as names
