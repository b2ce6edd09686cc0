"""How often an HLO `while` runs, where XLA's text does not say it outright.

In: the loop's condition and body. Out: a number, or None."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardfn.analysis._hlo.parse import Computation, Instruction, Module, behind


@dataclass(frozen=True, slots=True)
class Frame:
    """A computation that is being run and, for a loop's, the loop and who runs it."""

    computation: Computation
    loop: Instruction | None = None
    outer: Frame | None = None


def trip_count(loop: Instruction, frame: Frame, module: Module) -> int | None:
    """Iterations of a `while` in `frame`, or None where the text does not tell.

    XLA writes `known_trip_count` on CPU and GPU. On TPU it does not, so the counter's
    start, step and bound are looked up.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = Frame(module.called(loop, "condition")[0], loop, frame)
    body = Frame(module.called(loop, "body")[0], loop, frame)
    test = condition.computation.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter = _carry_index(condition.computation, test.operands[0])
    if counter is None:
        return None
    bound = _constant(test.operands[1], condition, module)
    start = _constant_carry(counter, loop, frame, module)
    step = _step(counter, body, module)
    if bound is None or start is None or not step:
        return None
    return max(0, -((start - bound) // step))


def _step(counter: int, body: Frame, module: Module) -> int | None:
    """What the body adds to the counter."""
    if body.computation.root.opcode != "tuple":
        return None
    add = behind(body.computation, body.computation.root.operands[counter])
    if add.opcode != "add":
        return None
    if _carry_index(body.computation, add.operands[0]) != counter:
        return None
    return _constant(add.operands[1], body, module)


def _constant(name: str, frame: Frame, module: Module) -> int | None:
    """The integer `name` holds in every iteration, also through loops' carries."""
    instr = behind(frame.computation, name)
    if instr.constant is not None:
        return instr.constant
    index = _carry_index(frame.computation, name)
    if index is None or frame.loop is None or frame.outer is None:
        return None
    body = module.called(frame.loop, "body")[0]
    if body.root.opcode != "tuple":
        return None
    if _carry_index(body, body.root.operands[index]) != index:
        return None
    return _constant_carry(index, frame.loop, frame.outer, module)


def _constant_carry(
    index: int, loop: Instruction, frame: Frame, module: Module
) -> int | None:
    """The integer that carry `index` starts from."""
    init = behind(frame.computation, loop.operands[0])
    if init.opcode != "tuple":
        return None
    return _constant(init.operands[index], frame, module)


def _carry_index(comp: Computation, name: str) -> int | None:
    """`i` where `name` is element `i` of the computation's parameter."""
    instr = behind(comp, name)
    if instr.element is None:
        return None
    is_carry = behind(comp, instr.operands[0]).opcode == "parameter"
    return instr.element if is_carry else None
