"""How many transfers may be in flight at once between hosts: what XLA schedules with
four, with five, which is the default, with six, and with eight, which is that of loops
that gather in turn and what tuning tries. Compiled for GPUs that are not there; needs
the extra `aot`; a row takes 1 to 7 minutes.

    python benchmarks/in_flight.py
    python benchmarks/in_flight.py --case t5-11b
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from balanced import compiled, print_table
from criteria_cases import GPT_1B, LLAMA_7B, SMALL, T5_11B

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
COUNTS = (4, 5, 6, 8)
CASES = {
    "gpt-0.9b": (SMALL, ("h100:64",)),
    "gpt-1.3b": (GPT_1B, ("h100:512",)),
    "llama-7b": (LLAMA_7B, ("h100:512",)),
    "t5-11b": (T5_11B, ("h100:512",)),
}
COLUMNS = (
    *("model", "target", *(f"step, {n}" for n in COUNTS)),
    *(f"{what}, {n}" for what in ("exposed", "memory") for n in COUNTS),
)


def row(name: str, target: str) -> list[str]:
    model = CASES[name][0]
    each = [compiled(model, target, compiler_options={LIMIT: n}) for n in COUNTS]
    return [
        *(name, target),
        *(f"{1e3 * report.step_seconds:,.1f} ms" for report in each),
        *(f"{report.exposed_seconds / report.step_seconds:.1%}" for report in each),
        *(f"{report.memory.temporary / 2**30:.2f} GiB" for report in each),
    ]


if __name__ == "__main__":
    print_table(__doc__, CASES, COLUMNS, row)
