"""What it is worth to gather a layer ahead what it uses first (`prefetch="first"`), in
loops between hosts that send small parts or compute for less than they send. It is the
default in those that compute for longer than they send, on Hopper GPUs. Compiled for
GPUs that are not there; needs the extra `aot`; a row takes 20 to 100 s.

    python benchmarks/first_gathers.py
    python benchmarks/first_gathers.py --case t5-11b
"""

import os
from dataclasses import replace

os.environ["JAX_PLATFORMS"] = "cpu"

from balanced import compiled, plan_of, print_table
from criteria_cases import GPT_1B, LLAMA_7B, SMALL, T5_11B, Model

from shardfn._schedule.order_gathers import orders_gathers

CASES = {
    "gpt-1.3b": (GPT_1B, ("h100:128", "h100:512")),
    "llama-7b": (LLAMA_7B, ("h100:512",)),
    "t5-11b": (T5_11B, ("h100:256", "h100:512")),
    "gpt-1.3b, 1 row": (replace(GPT_1B, rows=1), ("h100:64", "h100:512", "h200:64")),
    "gpt-1.3b, 2 rows": (replace(GPT_1B, rows=2), ("b200:64",)),
    "llama-7b, 2048 tokens": (replace(LLAMA_7B, context=2048), ("h100:64",)),
    "t5-11b, 4 rows": (replace(T5_11B, rows=4), ("h100:512",)),
    "gpt-0.9b": (SMALL, ("h100:64", "h100:512")),
}
COLUMNS = (
    *("model", "target", "planned", "step, nothing ahead", "first", "of it"),
    *("exposed, nothing ahead", "first", "memory, nothing ahead", "first"),
)


def planned(model: Model, target: str) -> str:
    """What a step gathers ahead by itself, and whether the rest is gathered in turn."""
    plan = plan_of(model, target)
    if not any(c.ahead for c in plan.collectives):
        return "nothing ahead"
    return "first, in turn" if orders_gathers(plan.body) else "first"


def row(name: str, target: str) -> list[str]:
    model = CASES[name][0]
    none = compiled(model, target, prefetch=0)
    first = compiled(model, target, prefetch="first")
    both = (none, first)
    return [
        *(name, target, planned(model, target)),
        *(f"{1e3 * each.step_seconds:,.1f} ms" for each in both),
        f"{first.step_seconds / none.step_seconds:.3f}",
        *(f"{each.exposed_seconds / each.step_seconds:.1%}" for each in both),
        *(f"{each.memory.temporary / 2**30:.2f} GiB" for each in both),
    ]


if __name__ == "__main__":
    print_table(__doc__, CASES, COLUMNS, row)
