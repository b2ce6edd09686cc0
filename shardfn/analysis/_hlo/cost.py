"""What an HLO instruction costs.

In: one instruction. Out: the FLOPs of its matrix products, and the bytes that it reads
and writes in device memory. Loops and calls are left to whoever walks the schedule.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from shardfn._core.line_names import DEQUANTIZED, QUANTIZED
from shardfn.analysis._hlo.collective import is_collective, jax_dtype
from shardfn.analysis._hlo.fused_attention import attention_flops, is_attention
from shardfn.analysis._hlo.parse import Computation, Instruction, Module, integers

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](\{[^{}]*\})?")
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "iota"),
    *("while", "conditional", "call", "copy-done", "async-done", "domain"),
)
FUSION_START = "fusion-start"
"""A fusion that runs beside others, as XLA's copies between buffers of a GPU do."""
FUSIONS = ("fusion", FUSION_START)
_VIEWS = ("bitcast", "copy", "reshape", "convert", "transpose")
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of an instruction's shape; `on_chip` if it is not in device memory, and
    `layout` the order of its dimensions there, as text."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool = False
    layout: str = field(default="", compare=False)

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in device memory."""
        return 0 if self.on_chip else self.elements * bits_of(self.dtype) // 8


@dataclass(frozen=True, slots=True)
class Cost:
    """What running an instruction once takes.

    Attributes:
      flops: of matmuls and convolutions, by the dtype of their operands.
      bytes: read from and written to device memory.
      quantizes: it writes values in fewer bits, or reads such, outside of matmuls.
    """

    flops: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    quantizes: bool = False


def arrays_of(shape: str) -> list[Array]:
    """The arrays in the text of a shape, tuples flattened."""
    return [
        Array(
            dtype,
            tuple(integers(dims)),
            bool(re.search(r"S\([1-9]\)", layout)),
            re.sub(r"S\(\d+\)", "", layout),
        )
        for dtype, dims, layout in _ARRAY.findall(shape)
        if dtype != "token"
    ]


def cost_of(instr: Instruction, comp: Computation, module: Module) -> Cost:
    """The cost of one instruction of a scheduled computation."""
    if instr.opcode in _FREE or instr.opcode.endswith("-done"):
        return Cost()
    flops = flops_of(instr, comp, module)
    quantizes = not flops and _quantizes(instr, module)
    return Cost(flops, _bytes(instr, comp, module), quantizes)


def _quantizes(instr: Instruction, module: Module) -> bool:
    """Whether an operation, or one that is fused into it, is of the quantizer."""
    if any(name in instr.op_name for name in (QUANTIZED, DEQUANTIZED)):
        return not is_collective(instr)
    inside = module.called(instr) if instr.opcode in FUSIONS else ()
    return any(
        _quantizes(each, module) for c in inside for each in c.instructions.values()
    )


def flops_of(instr: Instruction, comp: Computation, module: Module) -> Counter[str]:
    """FLOPs of matmuls, convolutions and attention in an instruction, by dtype."""
    if instr.opcode == "dot":
        return _dot(instr, comp, instr.attributes, "contracting_dims=")
    if instr.opcode == "convolution":
        return _convolution(instr, comp)
    if is_attention(instr):
        given = [arrays_of(comp.instructions[o].shape)[0] for o in instr.operands]
        flops = attention_flops(instr, [array.dims for array in given])
        return Counter({jax_dtype(given[0].dtype): flops})
    if instr.opcode == "custom-call" and '"dot_dimension_numbers"' in instr.attributes:
        return _dot(instr, comp, instr.attributes, 'contracting_dimensions":')
    found: Counter[str] = Counter()
    if instr.opcode in (*FUSIONS, "call", "async-start", "call-start"):
        for inner in module.called(instr):
            for each in inner.instructions.values():
                found += flops_of(each, inner, module)
    return found


def _dot(instr: Instruction, comp: Computation, text: str, key: str) -> Counter[str]:
    lhs = arrays_of(comp.instructions[instr.operands[0]].shape)[0]
    listed = re.search(rf'lhs_{re.escape(key)}[{{\[]([\d," ]*)', text)
    contracted = math.prod(lhs.dims[d] for d in integers(listed[1])) if listed else 1
    out = arrays_of(instr.shape)[0]
    return Counter({jax_dtype(lhs.dtype): 2 * out.elements * contracted})


def _convolution(instr: Instruction, comp: Computation) -> Counter[str]:
    """Two per pair of an input and a kernel element that meet.

    The TPU writes matmuls with batch dimensions as convolutions dilated so that most
    pairs meet a hole: those are not counted.
    """
    lhs, rhs = (arrays_of(comp.instructions[o].shape)[0] for o in instr.operands[:2])
    out = arrays_of(instr.shape)[0]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instr.attributes)
    if not labels:
        return Counter()
    left, right, result = labels.groups()
    pairs = 1
    for at in (c for c in right if c.isdigit()):
        pairs *= _meetings(
            int(at),
            lhs.dims[left.index(at)],
            rhs.dims[right.index(at)],
            out.dims[result.index(at)],
            instr.attributes,
        )
    batch, features = out.dims[result.index("b")], out.dims[result.index("f")]
    inputs = rhs.dims[right.index("i")]
    return Counter({jax_dtype(lhs.dtype): 2 * batch * features * inputs * pairs})


def _meetings(at: int, size: int, kernel: int, out: int, text: str) -> int:
    """Pairs of positions in one spatial dimension where input and kernel meet."""

    def entry(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=([\dx_\-]+)", text.partition("window={")[2])
        return found[1].split("x")[at] if found else default

    stride, low = int(entry("stride", "1")), int(entry("pad", "0_0").split("_")[0])
    spread, dilate = int(entry("lhs_dilate", "1")), int(entry("rhs_dilate", "1"))
    met = 0
    for k in range(kernel):
        positions = range(k * dilate - low, k * dilate - low + out * stride, stride)
        met += sum(p % spread == 0 and 0 <= p // spread < size for p in positions)
    return met


def _bytes(instr: Instruction, comp: Computation, module: Module) -> int:
    """Bytes of what is read and written, only the touched parts of sliced arrays."""
    operands = [comp.instructions[o].shape for o in instr.operands]
    read = [sum(a.bytes for a in arrays_of(shape)) for shape in operands]
    written = sum(a.bytes for a in arrays_of(instr.shape))
    if instr.opcode.endswith("-start") and instr.opcode != FUSION_START:
        return sum(read)
    if instr.opcode in _SLICES:
        return 2 * written + sum(read[1:])
    if instr.opcode == "dynamic-update-slice":
        return 2 * read[1]
    if instr.opcode not in FUSIONS:
        return sum(read) + written
    inner = module.called(instr, "calls")[0]
    written = sum(a.bytes for a in arrays_of(inner.root.shape))
    root = _behind_views(inner.root, inner)
    in_place = root.opcode == "dynamic-update-slice"
    if in_place:
        update = inner.instructions[root.operands[1]]
        written = sum(a.bytes for a in arrays_of(update.shape))
    for parameter in inner.of("parameter"):
        at = integers(parameter.arguments)[0]
        if in_place and _users(parameter, inner) == [root]:
            if _feeds(parameter, root, inner):
                read[at] = 0
        read[at] = min(read[at], _touched(parameter, inner, module))
    return sum(read) + written


def _touched(parameter: Instruction, comp: Computation, module: Module) -> int:
    """Bytes that a fusion reads of a parameter: the slices of it, also those that
    fusions inside of it take; all of it where something else uses it."""
    whole = sum(a.bytes for a in arrays_of(parameter.shape))
    touched, users = 0, _users(parameter, comp)
    for user in users:
        if user.opcode in _SLICES:
            touched += sum(a.bytes for a in arrays_of(user.shape))
        elif user.opcode in FUSIONS:
            inner = module.called(user, "calls")[0]
            for each in inner.of("parameter"):
                name = user.operands[integers(each.arguments)[0]]
                if _behind_views(comp.instructions[name], comp) is parameter:
                    touched += _touched(each, inner, module)
        else:
            return whole
    return min(touched, whole) if users else whole


def _behind_views(instr: Instruction, comp: Computation) -> Instruction:
    while instr.opcode in _VIEWS:
        instr = comp.instructions[instr.operands[0]]
    return instr


def _users(value: Instruction, comp: Computation) -> list[Instruction]:
    """Instructions that use a value, looking through views of it."""
    found: list[Instruction] = []
    for instr in comp.instructions.values():
        if value.name in instr.operands:
            through = instr.opcode in _VIEWS and instr is not comp.root
            found += _users(instr, comp) if through else [instr]
    return found


def _feeds(parameter: Instruction, root: Instruction, comp: Computation) -> bool:
    source = comp.instructions[root.operands[0]]
    return _behind_views(source, comp) is parameter


def bits_of(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8
