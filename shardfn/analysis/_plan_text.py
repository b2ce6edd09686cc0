"""A plan step by step, as text to compare.

In: a program and its plan. Out: a line per step, what control flow runs indented.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardfn._core.errors import where
from shardfn._core.leaves import names_text
from shardfn._core.plan import (
    Apply,
    BlockLoop,
    BodyPlan,
    HostSchedule,
    Ref,
    Reshard,
    Transfer,
)
from shardfn._core.program import Program
from shardfn._core.sharding import Axes
from shardfn.analysis._text import shape_text


def plan_lines(
    program: Program, body: BodyPlan, axes: Axes, indent: str = ""
) -> Iterator[str]:
    """`%5.1 = all_gather data %5`: version 1 of value 5 is made of version 0."""
    imports = "".join(f" {_name(ref)}" for ref in body.imports)
    if imports:
        yield f"{indent}imports{imports}"
    steps, outputs = body.run
    for step in steps:
        if isinstance(step, BlockLoop):
            yield f"{indent}{step.blocks} blocks of dimension {step.dim}"
            inner = HostSchedule(step.steps, ())
            inner = replace(body, host=inner, imports=(), exports=step.made)
            yield from plan_lines(program, inner, axes, f"{indent}    ")
            continue
        if isinstance(step, Transfer):
            yield indent + _transfer(step)
            continue
        if isinstance(step, Reshard):
            yield indent + _reshard(program, step, axes)
            continue
        yield indent + _apply(program, step, axes)
        node = program.nodes[step.node]
        for ahead in step.ahead:
            yield f"{indent}  {ahead.lead} iterations ahead"
            inner = node.bodies[0], ahead.part
            yield from plan_lines(*inner, axes, f"{indent}    ")
        for i, inner in enumerate(zip(node.bodies, step.bodies, strict=True)):
            yield f"{indent}  body {i}"
            yield from plan_lines(*inner, axes, f"{indent}    ")
    if body.duplicated:
        names = "".join(f" {_name(ref)}" for ref in body.duplicated)
        yield f"{indent}products make (limits.DUPLICATED_BYTES){names}"
    made = (*(ref for ref in outputs if ref is not None), *body.exports)
    if body.handed:
        yield f"{indent}hands on{''.join(f' {_name(ref)}' for ref in body.handed)}"
    yield f"{indent}returns{''.join(f' {_name(ref)}' for ref in made)}"


def _reshard(program: Program, step: Reshard, axes: Axes) -> str:
    moves = ", ".join(f"{m.name} {axes.names[m.axis]}" for m in step.moves)
    text = f"{_name(step.result)} = {moves or 'tie'} {_name(step.source)}"
    text += f"  {step.phase} {step.dtype} {shape_text(step.shape)}"
    leaf = names_text(program.leaf(step.source.value))
    text += f" for {leaf}" if leaf else ""
    text += f" after {_name(step.after)}" if step.after else ""
    return text + (f" with {_name(step.together)}" if step.together else "")


def _transfer(step: Transfer) -> str:
    text = f"{_name(step.result)} = to_{step.memory} {_name(step.source)}"
    text += f"  {step.during.phase} {step.dtype} {shape_text(step.shape)}"
    text += f" for {names_text(step.leaf)}" if step.leaf else ""
    return text + (f" after {_name(step.after)}" if step.after else "")


def _apply(program: Program, step: Apply, axes: Axes) -> str:
    node = program.nodes[step.node]
    results = (*map(Ref, node.outputs), *step.exports)
    operands = ["literal" if ref is None else _name(ref) for ref in step.operands]
    operands += map(_name, step.imports)
    text = f"{' '.join(map(_name, results))} = {' '.join((step.primitive, *operands))}"
    text += f"  at {where(node.eqn)}"
    parts = ", ".join(f"{axes.names[axis]} splits {f}" for f, axis in step.parts)
    text += f", {parts}" if parts else ""
    text += ", stacks last" * step.stacks_last
    return text + (f" after {_name(step.after)}" if step.after else "")


def _name(ref: Ref) -> str:
    return f"%{ref.value}.{ref.version}" if ref.version else f"%{ref.value}"
