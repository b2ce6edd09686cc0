"""Takes out of loops, and of remats that share it, what they make of weights alone.

In: a program whose values are named after leaves. Out: the program, in which a loop is
given the weights as its body, or a remat in that, uses them: cast, transposed, masked
or normalized; and so are several remats that cast the same weight. What is the same in
all iterations and only laid out anew, such as rows of features that are flattened or
padded, is laid out in front of the loop, too. So a gather or exchange of one is a move
of what they are given, which can leave them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax

from shardfn._core.leaves import Names
from shardfn._core.limits import PADDED_FEATURES
from shardfn._core.op_sharding_rule import Dim, OpShardingRule
from shardfn._core.program import VALUE, Atom, Node, Program, number_of
from shardfn._core.regions import with_constants
from shardfn._trace.value_relations import SAME, relation_of

PRODUCTS = (lax.dot_general_p, lax.conv_general_dilated_p)
"""They stay where they are: what is made of weights there is their plan's to choose."""
LAYOUTS = (lax.reshape_p, lax.concatenate_p)
"""They hold what they are given, the second one perhaps with zeros beside it."""
FILLS = (lax.broadcast_in_dim_p, lax.convert_element_type_p)

_Key = tuple[Any, ...]


def take_out_casts(program: Program) -> Program:
    """Takes casts and the like of weights out of loops, and of remats that share them;
    and out of loops, layouts of what is the same in all iterations.

    Args:
      program: the program, its values named.

    Returns:
      The program; the same one if there is nothing to take out.
    """
    named = {value for value in program.inputs if program.leaf(value)}
    taken = _Taken(list(program.avals), list(program.leaves), named)
    nodes = [_inside(node) for node in program.nodes]
    casts = (key for node in nodes if node.kind == "remat" for key in _casts(node))
    shared = {key for key, count in Counter(casts).items() if count > 1}
    for node in nodes:
        if node.is_loop:
            node = _looped(node, taken)
        elif node.kind == "remat" and shared:
            node = _called(node, taken, shared)
        taken.add(node)
    nodes = tuple(taken.nodes)
    if nodes == program.nodes:
        return program
    return replace(
        program,
        avals=tuple(taken.avals),
        leaves=tuple(taken.leaves),
        nodes=nodes,
    )


def _inside(node: Node) -> Node:
    bodies = tuple(map(take_out_casts, node.bodies))
    same = all(a is b for a, b in zip(bodies, node.bodies, strict=True))
    return node if same else replace(node, bodies=bodies)


@dataclass(slots=True)
class _Taken:
    """A program while nodes are taken into it out of the bodies that it has.

    Attributes:
      avals: of its values.
      leaves: their names.
      weights: those that are weights, or made of nothing else.
      nodes: its nodes so far.
      made: by equation and operands, what they make.
    """

    avals: list[Any]
    leaves: list[Names]
    weights: set[int]
    nodes: list[Node] = field(default_factory=list)
    made: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        values = {atom for atom in node.inputs if isinstance(atom, int)}
        if node.kind == "op" and not node.eqn.effects and values <= self.weights:
            self.weights.update(node.outputs)
        if node.kind == "op" and len(node.outputs) == 1:
            self.made.setdefault(_key(node, node.inputs), node.outputs[0])

    def take(self, node: Node, operands: tuple[Atom, ...], body: Program) -> int:
        """What a node of `body` makes, made here."""
        key = _key(node, operands)
        if key not in self.made:
            (value,) = node.outputs
            self.avals.append(body.avals[value])
            self.leaves.append(body.leaf(value))
            new = len(self.avals) - 1
            self.add(replace(node, inputs=operands, outputs=(new,)))
        return self.made[key]


def _key(node: Node, operands: Sequence[Atom]) -> _Key:
    """Equal for nodes that make the same: literals are part of an equation's key."""
    return id(node.eqn_key), *(a for a in operands if isinstance(a, int))


def _entering(remat: Node) -> dict[int, int]:
    """The inputs of a remat's body that are values, and what they are outside."""
    pairs = zip(remat.bodies[0].inputs, remat.inputs, strict=True)
    return {value: atom for value, atom in pairs if isinstance(atom, int)}


def _casts(remat: Node) -> set[_Key]:
    """What a remat makes of single weights that it is given."""
    (body,), outside = remat.bodies, _entering(remat)
    return {
        _key(node, [outside.get(number_of(a), a) for a in node.inputs])
        for node in body.nodes
        if _is_elementwise(node, body, outside)
    }


def _called(remat: Node, taken: _Taken, shared: Set[_Key]) -> Node:
    """A remat that is given what it shares with others."""
    body, more = _without_casts(remat.bodies[0], _entering(remat), taken, shared)
    if not more:
        return remat
    return _called_with(remat, body, *zip(*more, strict=True))


def _looped(loop: Node, taken: _Taken) -> Node:
    """A loop whose body is given what it makes of constant weights."""
    region, body = loop.regions[-1], loop.bodies[-1]
    constants = {
        body.inputs[i]: atom
        for i in region.constants
        if isinstance(atom := loop.inputs[region.operands[i]], int)
    }
    made = {value for value, atom in constants.items() if atom in taken.weights}
    body, more = _without_casts(body, constants, taken, made=made)
    if not more:
        return loop
    at, count = region.constants.stop, len(more)
    body = _with_inputs(body, at, [value for value, _ in more])
    at += region.operands[0]  # of a while loop, the test's constants come first
    inputs, kinds = list(loop.inputs), list(loop.kinds)
    inputs[at:at] = [atom for _, atom in more]
    kinds[at:at] = [VALUE] * count
    sides = len(inputs), len(loop.outputs)
    layout = with_constants(loop.kind, loop.regions, count, *sides)
    return replace(
        loop,
        inputs=tuple(inputs),
        kinds=tuple(kinds),
        regions=layout,
        bodies=(*loop.bodies[:-1], body),
    )


def _without_casts(
    body: Program,
    constants: Mapping[int, int],
    taken: _Taken,
    only: Set[_Key] | None = None,
    made: Set[int] = frozenset(),
) -> tuple[Program, list[tuple[int, int]]]:
    """A body that is given what it would make of constants alone.

    Args:
      body: the body of a loop, or of a remat.
      constants: the values that are constants, and what they are outside.
      taken: what is outside.
      only: of what it makes of `constants`, what to take out; all if not given.
      made: the constants that are made of weights alone, named or not.

    Returns:
      The body, and its values that are to be its inputs, with what they are outside.
    """
    outside, filled = dict(constants), dict[int, Node]()
    weights = {value for value in constants if body.leaf(value)} | made
    avals, leaves = list(body.avals), list(body.leaves)
    nodes: list[Node] = []
    more: list[tuple[int, int]] = []

    def take(node: Node) -> None:
        for value in filled.keys() & set(map(number_of, node.inputs)) - outside.keys():
            take(filled[value])
        operands = tuple(outside.get(number_of(a), a) for a in node.inputs)
        (value,) = node.outputs
        outside[value] = taken.take(node, operands, body)
        more.append((value, outside[value]))

    for node in body.nodes:
        if only is None and _is_of_weights(node, body, weights, filled):
            take(node)
            weights.update(node.outputs)
            continue
        if only is None and _lays_out(node, body, outside.keys(), filled):
            take(node)
            continue
        if only is not None and _is_elementwise(node, body, outside):
            operands = tuple(outside.get(number_of(a), a) for a in node.inputs)
            is_first = any(number_of(a) in constants for a in node.inputs)
            if not is_first or _key(node, operands) in only:
                take(node)
                continue
        if _is_filled(node, filled):
            filled[node.outputs[0]] = node
        if node.kind == "remat" and only is None:
            (inner,), entering = node.bodies, _entering(node)
            known = {v: outside[a] for v, a in entering.items() if a in outside}
            of_weights = {v for v, a in entering.items() if a in weights}
            inner, given = _without_casts(inner, known, taken, made=of_weights)
            if given:
                new = range(len(avals), len(avals) + len(given))
                avals += [inner.avals[value] for value, _ in given]
                leaves += [inner.leaf(value) for value, _ in given]
                more += zip(new, [atom for _, atom in given], strict=True)
                node = _called_with(node, inner, [v for v, _ in given], new)
        nodes.append(node)
    if not more:
        return body, []
    needed = {number_of(a) for node in nodes for a in node.inputs}
    needed.update(map(number_of, body.outputs))
    more = [(value, atom) for value, atom in more if value in needed]
    given_now = {value for value, _ in more} | (filled.keys() - needed)
    nodes = [n for n in nodes if not n.outputs or n.outputs[0] not in given_now]
    body = replace(body, avals=tuple(avals), leaves=tuple(leaves), nodes=tuple(nodes))
    return body, more


def _is_elementwise(node: Node, body: Program, outside: Mapping[int, int]) -> bool:
    """Whether a node casts or transposes a constant weight, or changes each element:
    any part of the result is made of the same part of the weight."""
    values = [atom for atom in node.inputs if isinstance(atom, int)]
    if node.kind != "op" or len(values) != 1 or values[0] not in outside:
        return False
    if node.eqn.effects or len(node.outputs) != 1 or not body.leaf(values[0]):
        return False
    at, rule = node.inputs.index(values[0]), node.rule
    return (
        rule is not None
        and _long(rule, rule.operands[at]) == _long(rule, rule.results[0])
        and relation_of(node, at, 0) == SAME
    )


def _is_of_weights(
    node: Node, body: Program, weights: Set[int], filled: Mapping[int, Node]
) -> bool:
    """Whether a node makes something no larger of constant weights, such as the product
    of one with a mask or with a norm of it; `filled` are arrays of one number."""
    values = {atom for atom in node.inputs if isinstance(atom, int)}
    if node.kind != "op" or node.eqn.primitive in PRODUCTS or node.rule is None:
        return False
    if node.eqn.effects or len(node.outputs) != 1:
        return False
    made = values - filled.keys()
    return (
        bool(made)
        and made <= weights
        and body.avals[node.outputs[0]].size
        <= max(body.avals[value].size for value in made)
    )


def _lays_out(
    node: Node, body: Program, outside: Set[int], filled: Mapping[int, Node]
) -> bool:
    """Whether a node only lays out anew one value from outside, with no more zeros
    beside it than features of rows get (`row_features`)."""
    values = {atom for atom in node.inputs if isinstance(atom, int)} - filled.keys()
    if node.eqn.primitive not in LAYOUTS or len(values) != 1 or not values <= outside:
        return False
    (value,), (made,) = values, node.outputs
    most = (1 + PADDED_FEATURES) * body.avals[value].size
    return body.avals[made].size <= most


def _is_filled(node: Node, filled: Mapping[int, Node]) -> bool:
    """Whether a node makes an array of one number, or that number."""
    values = {atom for atom in node.inputs if isinstance(atom, int)}
    return node.eqn.primitive in FILLS and values <= filled.keys()


def _long(rule: OpShardingRule, dims: Sequence[Dim]) -> list[Dim]:
    """Dimensions of more than one element, in no order."""
    factors = [tuple(f for f in dim if rule.size(f) > 1) for dim in dims]
    return sorted(filter(None, factors))


def _called_with(
    node: Node, inner: Program, values: Sequence[int], operands: Sequence[int]
) -> Node:
    """A remat whose body has these values as inputs, too."""
    inner = _with_inputs(inner, len(inner.inputs), values)
    inputs, count = (*node.inputs, *operands), len(operands)
    sides = len(inputs), len(node.outputs)
    return replace(
        node,
        inputs=inputs,
        kinds=(*node.kinds, *[VALUE] * count),
        regions=with_constants(node.kind, node.regions, count, *sides),
        bodies=(inner,),
    )


def _with_inputs(body: Program, at: int, values: Sequence[int]) -> Program:
    """A body with these values as inputs from position `at` on."""
    inputs = (*body.inputs[:at], *values, *body.inputs[at:])
    return replace(body, inputs=inputs)
