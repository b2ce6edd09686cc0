"""Draws the figures of the documentation, as SVG files beside this one.

In: a real plan (`one_step`), stored shardings (`storage`), benchmarks/README.md
(`wire`), benchmarks/results (`steps`); the others are drawn by hand. Out: text of SVG
files that are legible on light and dark pages. Run `python docs/figures/draw.py` to
write them.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp

import shardfn
from shardfn._core.plan import Ref, Reshard
from shardfn.analysis.plan import Plan
from shardfn.storage._layout import choose_dim

HERE = Path(__file__).parent
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333 }
.small { font-size: 11px; fill: #666 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.shard { fill: #b9cbe8 } .whole { fill: #4a72b8 } .gradient { fill: #e08a3c }
.batch { fill: #9fc8a4 } .result { fill: #57a05f }
.edge { fill: none; stroke: #999 } .line { fill: none; stroke: #666; stroke-width: 1.5 }
.area { fill: #4a72b8; opacity: .25 }
.small.white { fill: #fff }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .small { fill: #aaa }
  .shard { fill: #3c506f } .whole { fill: #7fa3e0 } .gradient { fill: #e6a268 }
  .batch { fill: #3f6b45 } .result { fill: #7cc285 }
  .edge { stroke: #777 } .line { stroke: #aaa } .small.white { fill: #111 }
}
"""


def svg(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{label}">'
    )
    return "\n".join([opening, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'class="{kind}"/>'
    )


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    joined = " L".join(f"{x:g},{y:g}" for x, y in points)
    return f'<path d="M{joined}" class="{kind}"/>'


# One step, from its plan

LAYERS = [f"w{i}" for i in range(1, 6)]


def mlp_plan() -> Plan:
    """The plan of a step of five layers over eight devices."""

    def train_step(params: dict[str, jax.Array], x: jax.Array):
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            y = x
            for name in LAYERS:
                y = jnp.tanh(y @ params[name])
            return jnp.mean(y**2)

        grads = jax.grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), ()

    weight = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    step = shardfn.fully_shard(train_step, jax.make_mesh((8,), ("data",)))
    return step.plan(dict.fromkeys(LAYERS, weight), x)


Event = tuple[str, str, Ref]
"""What happens, its label, and the version that it makes."""


def events(plan: Plan) -> tuple[list[Event], dict[Ref, int]]:
    """The gathers, matmuls and scatters of a plan in order; where each version of a
    value is used last."""
    found: list[Event] = []
    last: dict[Ref, int] = {}
    lines = iter(plan.collectives)
    for step in plan.body.steps:
        if isinstance(step, Reshard):
            line = next(lines)
            last[step.source] = len(found)
            kind = "gather" if step.gathers_state else "scatter"
            found.append((kind, line.path, step.result))
        elif step.primitive == "dot_general":
            for operand in step.operands:
                if operand:
                    last[operand] = len(found)
            found.append(("matmul", "", Ref(-1)))
    return found, last


def one_step() -> str:
    """A lane per weight: its shard, when it is whole, when its gradient is a term."""
    plan = mlp_plan()
    found, last = events(plan)
    left, column, lane = 56.0, 25.0, 40.0
    top, foot = 64.0, 64 + lane * len(LAYERS)
    width = left + column * len(found) + 16

    def at(index: float) -> float:
        return left + column * index

    parts = []
    held = [len(LAYERS) / 8.0] * len(found)
    for row, name in enumerate(LAYERS):
        y = top + lane * row
        parts.append(text(left - 10, y + 22, name, "end"))
        parts.append(rect(left, y + 30, column * len(found), 3, "shard"))
    for index, (kind, name, ref) in enumerate(found):
        if kind == "matmul":
            parts.append(rect(at(index) + 2, 34, column - 4, 16, "result"))
            continue
        y = top + lane * LAYERS.index(name)
        if kind == "gather":
            start, end, colour, label = index, last[ref], "whole", "g"
        else:  # made by the matmul before, a shard from here on
            start, end, colour, label = index - 1, index, "gradient", "s"
            y += 15
            held[index + 1 :] = [h + 1 / 8 for h in held[index + 1 :]]
        for i in range(start, end + 1):
            held[i] += 1
        parts.append(rect(at(start), y, column * (end - start + 1), 14, colour))
        parts.append(text(at(index) + column / 2, y + 11, label, "middle small white"))
    backward = next(i for i, (k, _, _) in enumerate(found) if k == "scatter") - 1
    parts.append(text(left - 10, 47, "matmul", "end small"))
    parts.append(text(left, 22, "forward"))
    parts.append(text(at(backward), 22, "backward"))
    edge = [(at(backward) - 1, 10), (at(backward) - 1, foot + 104)]
    parts.append(path(edge, "edge"))
    parts += _held(held, at, foot + 16)
    return svg(width, foot + 140, "Gathers and scatters of one step", parts)


def _held(held: list[float], at: Callable[[float], float], y: float) -> list[str]:
    """How much of weights and gradients a device holds, in weights, over the step."""
    unit, base = 20.0, y + 88
    points = [(at(0), base)]
    for i, h in enumerate(held):
        points += [(at(i), base - unit * h), (at(i + 1), base - unit * h)]
    points.append((at(len(held)), base))
    most, all_of_them = max(held), 2 * len(LAYERS)
    return [
        path(points, "area"),
        path(points[1:-1], "line"),
        text(at(0) - 10, base, "0", "end small"),
        text(at(0) - 10, base - unit * most + 6, f"{most:.1f}", "end small"),
        text(
            at(0),
            base + 28,
            "Weights and gradients on one device, in weights: "
            f"at most {most:.1f}; unsharded {all_of_them}.",
        ),
    ]


# One matmul


def matmul() -> str:
    """What the third of four devices holds of one matmul and of its gradient."""
    n, mine, cell = 4, 2, 16.0
    side = n * cell

    def grid(
        x: float, y: float, kind: str, split: str, own: bool, name: str
    ) -> list[str]:
        """A matrix; the part of it that device `mine` holds is filled."""
        out = []
        for k in range(n):
            filled = kind if own and k == mine or not own else "edge"
            if split == "rows":
                out.append(rect(x, y + k * cell, side, cell, filled))
            else:
                out.append(rect(x + k * cell, y, cell, side, filled))
        out.append(rect(x, y, side, side, "edge"))
        out.append(text(x + side / 2, y + side + 18, name, "middle"))
        return out

    up, down = 40.0, 180.0
    parts = [text(0, 20, "Forward")]
    parts += grid(24, up, "shard", "columns", True, "w, a shard")
    parts += arrow(104, up + side / 2, 96, "all-gather")
    parts += grid(224, up, "batch", "rows", True, "x, my rows")
    parts.append(text(304, up + side / 2 + 5, "@"))
    parts += grid(334, up, "whole", "columns", False, "w, whole")
    parts.append(text(416, up + side / 2 + 5, "="))
    parts += grid(444, up, "result", "rows", True, "y, my rows")
    parts.append(text(0, down - 20, "Backward"))
    parts += grid(24, down, "batch", "columns", True, "x.T, my columns")
    parts.append(text(104, down + side / 2 + 5, "@"))
    parts += grid(134, down, "result", "rows", True, "dy, my rows")
    parts.append(text(214, down + side / 2 + 5, "="))
    parts += grid(244, down, "gradient", "columns", False, "dw, my term")
    parts += arrow(328, down + side / 2, 96, "reduce-scatter")
    parts += grid(444, down, "gradient", "columns", True, "dw, a shard")
    return svg(540, down + side + 26, "One matmul on one of four devices", parts)


# Boxes and arrows

Box = tuple[str, ...]
"""A title, and lines below it."""


def arrow(x: float, y: float, length: float, above: str = "") -> list[str]:
    head = path(
        [(x + length - 6, y - 5), (x + length, y), (x + length - 6, y + 5)], "line"
    )
    words = [text(x + length / 2, y - 8, above, "middle small")] if above else []
    return [path([(x, y), (x + length, y)], "line"), head, *words]


def flow(label: str, rows: list[list[Box | str]], width: float = 132) -> str:
    """Rows of boxes with arrows between them, which strings say the work of."""
    parts, y, right, gap = [], 12.0, 0.0, 76.0
    for row in rows:
        boxes = [cell for cell in row if not isinstance(cell, str)]
        height, x = 26 + 16.0 * max(len(box) - 1 for box in boxes), 2.0
        for cell in row:
            if isinstance(cell, str):
                parts += arrow(x + 4, y + height / 2, gap - 8, cell)
                x += gap
                continue
            parts.append(rect(x, y, width, height, "edge"))
            parts.append(text(x + width / 2, y + 18, cell[0], "middle"))
            for i, line in enumerate(cell[1:]):
                parts.append(text(x + width / 2, y + 36 + 16 * i, line, "middle small"))
            x += width
        right, y = max(right, x), y + height + 22
    return svg(right + 2, y - 10, label, parts)


def pipeline() -> str:
    step, program = ("train_step", "your function"), ("Program", "global shapes")
    plan = ("plan", "factors and moves")
    better = ("plan", "the same moves,", "at better times")
    local = ("local program", "of one device")
    row = [
        step,
        "trace",
        program,
        "propagate",
        plan,
        "schedule",
        better,
        "lower",
        local,
    ]
    return flow("The stages of fully_shard", [row], width=118)


def trace() -> str:
    step = ("train_step", "state, batch", "as abstract values")
    jaxpr = ("jaxpr", "equations on", "global shapes")
    program = ("Program", "calls inlined,", "equal values merged")
    marked = ("Program", "passes, leaves,", "state found")
    return flow(
        "The trace", [[step, "jaxpr", jaxpr, "number", program, "mark", marked]]
    )


def lowering() -> str:
    plan = ("plan", "what is split,", "what moves when")
    local = ("local program", "the same equations", "on local blocks")
    manual = ("shard_map", "manual over data,", "types checked")
    jitted = ("jit", "stored shardings in,", "state donated")
    return flow("Lowering", [[plan, "emit", local, "wrap", manual, "compile", jitted]])


def analysis() -> str:
    plan, table = ("plan", "frozen value"), ("Plan", "one line per move")
    program, moves = (
        ("compiled", "text of the program"),
        ("collectives", "with sizes, groups"),
    )
    checked, report = (
        ("Verification", "line by line"),
        ("Report", "memory, bytes, time"),
    )
    return flow(
        "What is read off a plan and a compiled program",
        [
            [plan, "list", table],
            [program, "read", moves, "compare", checked],
            [program, "read", moves, "play", report],
        ],
    )


def values() -> str:
    """The three ways to lie along a mesh axis, and the moves between them."""
    width, gap, y, height = 132.0, 144.0, 40.0, 46.0
    names = [
        ("unreduced", "a term of the sum"),
        ("split", "a block"),
        ("replicated", "all of it"),
    ]
    parts = []
    for i, (name, what) in enumerate(names):
        x = 2 + i * (width + gap)
        parts.append(rect(x, y, width, height, "edge"))
        parts.append(text(x + width / 2, y + 20, name, "middle"))
        parts.append(text(x + width / 2, y + 38, what, "middle small"))
    parts += arrow(width + 6, y + 16, gap - 8, "reduce-scatter")
    parts += arrow(2 * width + gap + 6, y + 16, gap - 8, "all-gather")
    back = 2 * width + 2 * gap - 2
    parts.append(path([(back, y + 34), (back - gap + 8, y + 34)], "line"))
    tip = back - gap + 8
    parts.append(path([(tip + 6, y + 29), (tip, y + 34), (tip + 6, y + 39)], "line"))
    parts.append(
        text(back - gap / 2 + 4, y + 50, "slice: nothing moves", "middle small")
    )
    left, right, low = 2 + width / 2, 2 + 2.5 * width + 2 * gap, y + height + 26
    parts.append(path([(left, y + height), (left, low), (right, low)], "line"))
    parts.append(path([(right, low), (right, y + height + 2)], "line"))
    up = [
        (right - 5, y + height + 8),
        (right, y + height + 2),
        (right + 5, y + height + 8),
    ]
    parts.append(path(up, "line"))
    parts.append(text((left + right) / 2, low + 16, "all-reduce", "middle small"))
    top = 2 + 1.5 * width + gap
    loop = [(top - 30, y), (top - 30, y - 16), (top + 30, y - 16), (top + 30, y - 2)]
    parts.append(path(loop, "line"))
    parts.append(
        path([(top + 25, y - 8), (top + 30, y - 2), (top + 35, y - 8)], "line")
    )
    parts.append(text(top, y - 22, "all-to-all: another dimension", "middle small"))
    return svg(3 * width + 2 * gap + 4, low + 24, "Moves between shardings", parts)


# How leaves are stored


def storage() -> str:
    """Which elements of three leaves the third of four devices stores."""
    count, mine, cell, x = 4, 2, 14.0, 2.0
    parts = []
    for rows, columns in ((8, 6), (6, 8), (5, 3)):
        dim = choose_dim((rows, columns), count)
        said = "flattened and padded" if dim is None or dim < 0 else f"dimension {dim}"
        for row in range(rows):
            for column in range(columns):
                at = (row, column)
                index = row * columns + column if dim is None or dim < 0 else at[dim]
                size = (
                    rows * columns if dim is None or dim < 0 else (rows, columns)[dim]
                )
                own = index // -(-size // count) == mine
                kind = "whole" if own else "edge"
                parts.append(rect(x + column * cell, 30 + row * cell, cell, cell, kind))
        parts.append(text(x, 18, f"[{rows}, {columns}]"))
        parts.append(text(x, 30 + 8 * cell + 20, f"split: {said}", "small"))
        x += max(columns * cell, 160) + 30
    return svg(
        x - 20, 30 + 8 * cell + 30, "What the third of four devices stores", parts
    )


# Bytes and memory beside jit

ROW = re.compile(r"\|([^|]*)\| ([^|]+) \| [\d.]+ \| ([\d.]+) \| \d+% \| ([\d.]+) \|")


def wire() -> str:
    """Bars of the table in benchmarks/README.md."""
    table = ROW.findall((HERE.parents[1] / "benchmarks" / "README.md").read_text())
    parts, y = [], 8.0
    scale = 440 / max(float(sent) for _, _, sent, _ in table)
    for case, program, sent, _ in table:
        if case.strip():
            y += 12 if parts else 0
            parts.append(text(0, y + 14, case.strip().split(", M")[0]))
            y += 24
        kind = "whole" if program.strip() == "shardfn" else "gradient"
        parts.append(text(130, y + 14, program.strip(), "end small"))
        parts.append(rect(140, y, float(sent) * scale, 18, kind))
        parts.append(text(146 + float(sent) * scale, y + 14, f"{float(sent):.2f} M"))
        y += 24
    return svg(660, y + 4, "Bytes that each device sends per step", parts)


# Predicted steps beside the best baseline


def steps() -> str:
    """Bars of benchmarks/results: the predicted step of `fully_shard` without options,
    of the constrained step and of ZeRO-3 by hand, as parts of the longest."""
    names = {"shardfn": "shardfn", "constrained": "jit, constrained by hand"}
    names |= {"shard_map by hand": "ZeRO-3 in shard_map by hand"}
    parts, y = [], 8.0
    for case, title in PLAYED.items():
        file = HERE.parents[1] / "benchmarks" / "results" / "h100" / f"{case}.json"
        rows = json.loads(file.read_text())
        took = {name: rows[name]["step_s"] for name in names}
        parts.append(text(2, y + 14, title))
        y += 24
        for name, seconds in took.items():
            width = 360 * seconds / max(took.values())
            parts.append(text(174, y + 14, names[name], "end small"))
            parts.append(
                rect(180, y, width, 18, "whole" if name == "shardfn" else "gradient")
            )
            shown = f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"
            parts.append(text(186 + width, y + 14, shown))
            y += 22
        y += 8
    return svg(640, y, "Predicted seconds per step on H100s", parts)


PLAYED = {
    "gpt-1.3b-8": "GPT 1.3B on 8 H100s",
    "llama-7b-64": "Llama 7B on 64 H100s",
    "gpt-175b-512": "GPT 175B on 512 H100s",
}
"""Cases of benchmarks/criteria.py, and how the figure calls them."""


FIGURES = {
    "pipeline.svg": pipeline,
    "matmul.svg": matmul,
    "trace.svg": trace,
    "values.svg": values,
    "one_step.svg": one_step,
    "lowering.svg": lowering,
    "storage.svg": storage,
    "analysis.svg": analysis,
    "wire.svg": wire,
    "steps.svg": steps,
}

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw())
