"""How much of the devices' arithmetic a run uses: model and device in, numbers out."""

import resource

import jax
from config import ModelConfig
from models import count_parameters

from shardfn.analysis.targets import target

# As `device_kind` writes them. None of these names is part of another.
CHIPS = {
    "A100": "a100:1",
    "H100": "h100:1",
    "H200": "h200:1",
    "B200": "b200:1",
    "TPU v5 lite": "tpu:v5e:1x1",
    "TPU v5p": "tpu:v5p:1x1x1",
    "TPU v5": "tpu:v5p:1x1x1",
    "TPU v6 lite": "tpu:v6e:1x1",
}


def per_token(config: ModelConfig) -> float:
    """Returns the floating-point operations that training on one token needs.

    Six per weight of a matrix product, and twelve per layer, head width and token that
    may be seen (half of the window on average), as in PaLM (arXiv:2204.02311,
    appendix B). What remat computes again is not counted.
    """
    weights = count_parameters(config)
    if not config.tied:
        weights -= config.vocabulary * config.width  # a look-up, not a product
    attention = 12 * config.layers * config.width * config.context / 2
    return 6 * weights + attention


def peak() -> float | None:
    """Returns bfloat16 operations per second of all devices, if they are known."""
    kind = jax.devices()[0].device_kind
    for part, name in CHIPS.items():
        if part in kind:
            return target(name).flops * jax.device_count()
    return None


def memory_in_use() -> float:
    """Returns bytes in use on the first local device; of the process, on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["bytes_in_use"]
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return float("nan")
