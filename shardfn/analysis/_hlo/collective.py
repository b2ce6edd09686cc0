"""What a collective of a compiled program moves, in JAX's words.

In: one HLO instruction. Out: operation, dtype, elements and devices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardfn._core.moves import MOVES, AllToAll, Permute, ReduceScatter
from shardfn.analysis._hlo.groups import Groups, device_groups
from shardfn.analysis._hlo.parse import Instruction, Module, integers, leaves

_OPS = {name: move.op for move in MOVES for name in move.hlo_ops}
_OTHERS = ("collective-broadcast",)
"""Collectives that no move compiles to."""
_REDUCERS = {
    "add": "sum",
    "maximum": "max",
    "minimum": "min",
    "multiply": "prod",
    "and": "and",
    "or": "or",
}
_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"s{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"c{n}": f"complex{n}" for n in (64, 128)},
}


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One array that one collective of a compiled program moves.

    Attributes:
      op: the collective, in the plan's words (see `moves`): `all_gather`,
        `psum_scatter`, `all_reduce`, `all_to_all`, `ppermute`; `collective_broadcast`
        is in no plan.
      dtype: JAX's name of the dtype on the wire.
      elements: of the whole array: gathered, or before it is scattered; for the others
        what one device holds.
      groups: device numbers, in mesh order, that talk to each other; for `ppermute` the
        cycles.
      times: how often one step runs it: the product of the trip counts around it.
      exact: False where a loop around it has no known trip count and was taken as 1.
      combined: arrays that share this HLO instruction, at least 1.
      overlapped: a matrix product is scheduled between its start and its end.
      op_name: the JAX call that it came from. XLA keeps one for a combined collective.
      reduces: what a reduction reduces with, as in plans: "sum", "max", "min", "prod",
        "and", "or"; else "".
    """

    op: str
    dtype: str
    elements: int
    groups: Groups = field(repr=False)
    times: int = 1
    exact: bool = True
    combined: int = 1
    overlapped: bool = False
    op_name: str = ""
    reduces: str = ""

    @property
    def group_size(self) -> int:
        """Devices per group."""
        return max(len(g) for g in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes of `elements`."""
        bits = 8 if self.dtype == "bool" else integers(self.dtype)[0]
        return -(-self.elements * bits // 8)

    @property
    def wire_bytes(self) -> int:
        """Bytes each device sends per run, by the ring algorithm."""
        n = self.group_size
        if self.op not in _TRIPS or self.op == Permute.op:
            return self.bytes
        return _TRIPS[self.op] * self.bytes * (n - 1) // n


_TRIPS = {move.op: move.trips for move in MOVES}


def is_collective(instr: Instruction) -> bool:
    """Whether `instr` is a collective, or the `-start` of one."""
    opcode = instr.opcode.removesuffix("-start")
    return opcode in _OPS or opcode in _OTHERS


def is_synchronous(instr: Instruction) -> bool:
    """Whether nothing else can run on the device while `instr` moves its arrays: it has
    no `-done`, or the GPU compiler has put it on the stream of the computation."""
    return not instr.opcode.endswith("-start") or _ON_COMPUTE_STREAM in instr.attributes


_ON_COMPUTE_STREAM = '"is_sync":true'


def arrays(instr: Instruction, module: Module) -> list[HloCollective]:
    """The collective `instr` as one entry per array, run once."""
    opcode = instr.opcode.removesuffix("-start")
    op = _OPS.get(opcode, opcode.replace("-", "_"))
    reduces, packed = _reducer(instr, module) if op in _SUMS else ("", "")
    groups = device_groups(instr, module.num_devices)
    results = _results(instr)
    shared = HloCollective(
        op,
        dtype="",
        elements=0,
        groups=groups,
        combined=len(results),
        op_name=instr.op_name,
        reduces=reduces,
    )
    found = (replace(shared, dtype=jax_dtype(d), elements=n) for d, n in results)
    whole = shared.group_size if op == ReduceScatter.op else 1
    return [_unpacked(replace(c, elements=c.elements * whole), packed) for c in found]


def _unpacked(words: HloCollective, dtype: str) -> HloCollective:
    """The TPU sums narrow types several to a word; count them one by one."""
    if not dtype or dtype == words.dtype:
        return words
    size = replace(words, dtype=dtype, elements=words.elements).bytes
    return replace(words, dtype=dtype, elements=words.elements * words.bytes // size)


def jax_dtype(dtype: str) -> str:
    """`bf16` -> `bfloat16`, `f8e4m3fn` -> `float8_e4m3fn`."""
    return _DTYPES.get(dtype, dtype.replace("f", "float", 1).replace("e", "_e", 1))


def _results(instr: Instruction) -> list[tuple[str, int]]:
    """Dtype and elements of each result; a `-start` lists its operands before them."""
    count, found = len(instr.operands), list(leaves(instr.shape))
    if instr.opcode.endswith("-start") and instr.opcode != "all-reduce-start":
        found = found[count:]
    found = found[:count]
    if instr.opcode in AllToAll.hlo_ops and "dimensions=" not in instr.attributes:
        return [(found[0][0], sum(elements for _, elements in found))]
    return found


_SUMS = {move.op for move in MOVES if move.sums}


def _reducer(instr: Instruction, module: Module) -> tuple[str, str]:
    """What it reduces with, and the dtype that it sums if that is packed into words."""
    steps = module.called(instr, "to_apply")[0].instructions.values()
    is_packed = any(i.opcode == "shift-left" for i in steps)
    reducers = _REDUCERS.keys() - ({"or"} if is_packed else set())
    found = {i.opcode: i for i in steps if i.opcode in reducers}
    if len(found) != 1:
        raise ValueError(
            f"cannot tell what '{instr.name}' reduces with: found {sorted(found)} in "
            f"'{instr.calls['to_apply'][0]}'."
        )
    ((opcode, reducer),) = found.items()
    packed = jax_dtype(leaves(reducer.shape)[0][0]) if is_packed else ""
    return _REDUCERS[opcode], packed
