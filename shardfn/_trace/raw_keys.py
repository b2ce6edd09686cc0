"""Which arguments of a step are raw PRNG keys: words that it makes random numbers from.

In: a program. Out: the positions of its arguments that come, as they are, where JAX
takes the words of a key, and of those that nothing reads. Shape and dtype do not tell:
uint32 rows may look the same.
"""

from collections.abc import Sequence

from shardfn._core.program import Atom, Node, Program, number_of
from shardfn._trace.dataflow import through_bodies

Words = frozenset[tuple[int, bool]]
"""The arguments that a value holds the words of, and whether only some of each."""

NO_WORDS: Words = frozenset()

_KEY_OPERANDS = {"random_wrap": (0,), "rng_bit_generator": (0,), "threefry2x32": (0, 1)}
_CUTS = ("slice", "dynamic_slice", "gather", "split", "unstack")
_MOVES = ("reshape", "squeeze", "broadcast_in_dim", "copy", "copy_p", *_CUTS)


def raw_keys(program: Program) -> frozenset[int]:
    """The positions of a program's arguments that are raw keys."""
    found: set[int] = set()
    given = [frozenset({(i, False)}) for i in range(len(program.inputs))]
    _outputs(program, given, found)
    return frozenset(found)


def unread(program: Program) -> frozenset[int]:
    """The positions of a program's arguments that nothing reads."""
    read = {number_of(atom) for node in program.nodes for atom in node.inputs}
    read.update(map(number_of, program.outputs))
    return frozenset(i for i, v in enumerate(program.inputs) if v not in read)


def _outputs(program: Program, given: Sequence[Words], found: set[int]) -> list[Words]:
    """What the outputs hold; the keys on the way go into `found`."""
    known = dict(zip(program.inputs, given, strict=True))

    def read(atom: Atom | None) -> Words:
        return known.get(atom, NO_WORDS) if isinstance(atom, int) else NO_WORDS

    for node in program.nodes:
        ins = [read(atom) for atom in node.inputs]
        if not any(ins):
            continue
        name = node.eqn.primitive.name
        for i in _KEY_OPERANDS.get(name, ()):
            found.update(at for at, cut in ins[i] if cut == (name == "threefry2x32"))
        if node.bodies:
            results = through_bodies(
                node, ins, lambda body, inner: _outputs(body, inner, found), NO_WORDS
            )
        elif node.passes_through:
            results = ins[: len(node.outputs)]
        else:
            results = [_through_op(node, ins, j) for j in range(len(node.outputs))]
        known.update(zip(node.outputs, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _through_op(node: Node, ins: Sequence[Words], result: int) -> Words:
    """What a result of an operation holds, if that moves words or changes each."""
    name, rule = node.eqn.primitive.name, node.rule
    if name in _MOVES:
        return frozenset((i, cut or name in _CUTS) for i, cut in ins[0])
    if rule is None:
        return NO_WORDS
    each = (i for i, dims in enumerate(rule.operands) if dims == rule.results[result])
    return NO_WORDS.union(*(ins[i] for i in each))
