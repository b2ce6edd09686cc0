"""Names in; what each criterion's case trains, on how many devices, out.

Sizes are those of the published models; rows per device those of the FSDP paper for T5
and GPT-175B (arXiv:2304.11277). The first case is also taken unrolled.
"""

from dataclasses import dataclass, replace

TORUS = {
    8: "2x2x2",
    64: "4x4x4",
    128: "4x4x8",
    512: "8x8x8",
    4096: "16x16x16",
}
"""TPU slices by number of devices."""


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer as `criteria_models` makes it.

    Attributes:
      family: `gpt`, `llama` or `t5`; T5 has `layers` in each of its two stacks.
      rows: per device.
      scan: one scanned body, or `layers` bodies.
      remat: whether the backward pass computes each layer's activations again.
      microbatches: how many the rows are cut into, whose gradients are added up.
      kv_heads: fewer heads of keys and values than `heads`; 0 for as many.
      fused: whether cuDNN attends, which makes no scores in memory.
    """

    family: str
    layers: int
    width: int
    heads: int
    head_width: int
    mlp_width: int
    vocabulary: int
    context: int
    rows: int
    scan: bool = True
    remat: bool = True
    microbatches: int = 1
    kv_heads: int = 0
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of devices; `criteria` are those that it is judged by."""

    name: str
    model: Model
    devices: int
    criteria: tuple[int, ...] = (1, 2, 3, 5, 8)

    def target(self, chip: str) -> str:
        """The compile-only target: `h100` or `v5p`."""
        if chip == "v5p":
            return f"tpu:v5p:{TORUS[self.devices]}"
        return f"{chip}:{self.devices}"


GPT_1B = Model("gpt", 24, 2048, 16, 128, 8192, 50304, 2048, rows=4)
LLAMA_7B = Model("llama", 32, 4096, 32, 128, 11008, 32000, 4096, rows=1)
LLAMA3_8B = Model("llama", 32, 4096, 32, 128, 14336, 128256, 4096, rows=1, kv_heads=8)
T5_11B = Model("t5", 24, 1024, 128, 128, 65536, 32128, 512, rows=8)
GPT_175B = Model("gpt", 96, 12288, 96, 128, 49152, 50304, 2048, rows=1)
SMALL = Model("gpt", 4, 4096, 32, 128, 16384, 32768, 1024, rows=1)
RUN = Model("gpt", 4, 256, 4, 64, 1024, 4096, 128, rows=1)

_CASES = (
    Case("gpt-1.3b-8", GPT_1B, 8),
    Case("gpt-1.3b-8-unrolled", replace(GPT_1B, scan=False), 8),
    Case("gpt-1.3b-8-unrolled-kept", replace(GPT_1B, scan=False, remat=False), 8),
    Case("llama-7b-64", LLAMA_7B, 64),
    Case("t5-11b-8", T5_11B, 8),
    Case("t5-11b-512", T5_11B, 512),
    Case("gpt-175b-128", GPT_175B, 128),
    Case("gpt-175b-512", replace(GPT_175B, rows=2), 512),
    Case("gpt-1.3b-8-micro", replace(GPT_1B, rows=8, microbatches=8), 8, criteria=(4,)),
    *(Case(f"gpt-0.9b-{n}", SMALL, n, criteria=(6,)) for n in (8, 64, 512, 4096)),
)
CASES = {case.name: case for case in _CASES}
CHIPS = ("h100", "v5p")
