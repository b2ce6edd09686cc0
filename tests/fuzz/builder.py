"""Builds programs from random choices, so that every one is well typed.

In: hypothesis's `draw` and the table of operations. Out: `Block`s. Every value is known
to be a small integer in floating-point clothes, or not: operations with jumps (a sort,
a maximum, a comparison) only get such integers, because rounding, which depends on the
order of sums, could make them jump.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from hypothesis import strategies as st
from language import NARROW, Block, Call, Type, run_call

LARGEST = 8192  # elements of a value
BOUND = 64  # size of its elements


class NotPossible(Exception):
    """No value fits the operation."""


@dataclass(frozen=True)
class Value:
    """A value: `exact` if its elements are integers, none above `bound`."""

    name: str
    type: Type
    exact: bool
    bound: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Operation:
    """One operation of the language.

    Attributes:
      name: its name.
      run: the function; takes arrays, and what `choose` gives as keyword arguments.
      choose: draws operands, keyword arguments and bodies.
      jumps: whether it or its gradient jumps: then operands have to be exact.
      exact: whether integers make integers.
      growth: a bound of the results, of the operands' bounds and all types.
    """

    name: str
    run: Callable[..., Any]
    choose: "Callable[[Builder], Chosen]"
    jumps: bool
    exact: bool
    growth: Callable[[Sequence[Value], Sequence[Type]], int]


Chosen = tuple[Sequence[Value], dict[str, Any]]


def largest(args: Sequence[Value], results: Sequence[Type]) -> int:
    return max((a.bound for a in args), default=1)


def total(args: Sequence[Value], results: Sequence[Type]) -> int:
    return sum(a.bound for a in args)


def product(args: Sequence[Value], results: Sequence[Type]) -> int:
    out = 1
    for a in args:
        out *= max(a.bound, 1)
    return out


def contracted(args: Sequence[Value], results: Sequence[Type]) -> int:
    return product(args, results) * max(max(a.shape, default=1) for a in args)


def summed(args: Sequence[Value], results: Sequence[Type]) -> int:
    return args[0].bound * max(args[0].type.size // max(results[0].size, 1), 1)


def bounded(bound: int) -> Callable[[Sequence[Value], Sequence[Type]], int]:
    return lambda args, results: bound


@dataclass
class Builder:
    """One block while it is built.

    Attributes:
      draw: hypothesis's choice.
      table: the operations.
      sizes: sizes of dimensions that this program uses.
      values: what exists so far, newest last.
      depth: how many bodies the block lies in.
      only_exact: whether every value has to be exact.
      leaves: leaves of the state and batch, which grow as they are asked for; only at
        depth 0.
      rows: rows of the batch.
      favoured: operations that are chosen more often.
      smooth: whether no value may be chosen by a jump.
    """

    draw: Callable[[st.SearchStrategy], Any]
    table: dict[str, Operation]
    sizes: Sequence[int]
    rows: int
    values: list[Value] = field(default_factory=list)
    depth: int = 0
    only_exact: bool = False
    favoured: Sequence[str] = ()
    smooth: bool = False
    leaves: dict[str, list[Type]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    count: int = 0

    # Choices

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, max(low, high)))

    def boolean(self) -> bool:
        return self.draw(st.booleans())

    def one_of(self, choices: Sequence[Any]) -> Any:
        if not choices:
            raise NotPossible
        return self.draw(st.sampled_from(choices))

    def size(self) -> int:
        return self.one_of(self.sizes)

    def axis(self, x: Value) -> int:
        if not x.ndim:
            raise NotPossible
        return self.integer(0, x.ndim - 1)

    def pick(
        self,
        dtype: str = "f",
        ndim: int = 0,
        test: Callable[[Value], bool] = lambda v: True,
    ) -> Value:
        """A value with this dtype, at least `ndim` dimensions and some elements."""
        fits = [
            v
            for v in reversed(self.values)
            if v.type.dtype in dtype and v.ndim >= ndim and v.type.size and test(v)
        ]
        return self.one_of(fits)

    def exact(self, dtype: str = "f", ndim: int = 0, **kwargs: Any) -> Value:
        test = kwargs.pop("test", lambda v: True)
        return self.pick(dtype, ndim, lambda v: v.exact and test(v))

    def param(self, *shape: int) -> Value:
        """A new leaf of the state, or an old one of this shape."""
        return self.leaf("p", Type(shape))

    def leaf(self, kind: str, type_: Type) -> Value:
        old = [v for v in self.values if v.type == type_ and v.name[0] == kind]
        if self.depth or len(self.leaves[kind]) > 5 or (old and self.boolean()):
            return self.one_of(old)
        if type_.size > LARGEST:
            raise NotPossible
        name = f"{kind}{len(self.leaves[kind])}"
        self.leaves[kind].append(type_)
        value = Value(name, type_, True, 3 if type_.dtype == "f" else 4)
        self.values.insert(0, value)
        return value

    # Building

    def add(self, name: str) -> list[Value]:
        """Adds a call of the operation `name`, its operands chosen at random."""
        op = self.table[name]
        args, params = op.choose(self)
        if op.jumps and (self.smooth or not all(a.exact for a in args)):
            raise NotPossible
        return self.call(name, args, **params)

    def call(self, name: str, args: Sequence[Value], **params: Any) -> list[Value]:
        """Adds a call; large results are made small again."""
        op = self.table[name]
        bodies = params.pop("bodies", ())
        call = Call(
            name,
            tuple(a.name for a in args),
            tuple(params.items()),
            tuple(b for b, _ in bodies),
        )
        types = self.result_types(call, args)
        exact = all(a.exact for a in args) and op.exact
        flags = [exacts for _, exacts in bodies]
        kept = list(map(all, zip(*flags, strict=True))) or [exact] * len(types)
        if any(t.size > LARGEST for t in types):
            raise NotPossible
        if self.only_exact and not all(kept):
            raise NotPossible
        self.calls.append(call)
        bound = op.growth(args, types)
        made = []
        for type_, is_exact in zip(types, kept, strict=True):
            is_exact = is_exact or type_.dtype != "f"
            made.append(Value(f"v{self.count}", type_, is_exact, bound))
            self.count += 1
        if bound <= BOUND:
            self.values += made
            return made
        small = []
        for value in made:
            is_kept = value.type.dtype in "bk" + NARROW
            small += [value] if is_kept else self.squashed(value)
        self.values += [v for v in small if v not in self.values]
        return small

    def squashed(self, value: Value) -> list[Value]:
        is_exact = value.exact and not self.smooth
        return self.call("wrap" if is_exact else "squash", [value])

    def result_types(self, call: Call, args: Sequence[Value]) -> list[Type]:
        run = {name: op.run for name, op in self.table.items()}
        avals = {a.name: a.type.aval for a in args}
        try:
            out = jax.eval_shape(lambda env: list(run_call(call, env, run)), avals)
        except OverflowError:  # JAX compares an index of int8 with a size of 240
            raise NotPossible from None
        return [Type.of(x) for x in out]

    def grow(self, names: Sequence[str], count: int) -> None:
        """Adds `count` calls at random; a call that fits nothing is left out."""
        for _ in range(count):
            for _ in range(4):
                try:
                    self.add(self.one_of(names))
                    break
                except NotPossible:
                    continue

    # Bodies

    def body(
        self,
        inputs: Sequence[Value | Type],
        like: Sequence[Type],
        extra: int = 0,
        only_exact: bool = False,
        first: tuple[str, Sequence[int]] | None = None,
    ) -> tuple[Block, list[bool], list[Type]]:
        """A body whose first outputs are of the types `like`, and `extra` others.

        Args:
          inputs: what it takes; a value stands for itself or a part of itself.
          like: types of its first outputs.
          extra: how many other outputs it has.
          only_exact: whether every value in it has to be exact.
          first: its first operation, if that is given, and positions of its operands.

        Returns:
          The body, which outputs are exact, and their types.
        """
        inner = Builder(
            self.draw, self.table, self.sizes, self.rows, depth=self.depth + 1
        )
        inner.only_exact = only_exact or self.only_exact
        inner.favoured, inner.smooth = self.favoured, self.smooth
        for i, x in enumerate(inputs):
            exact, bound = (x.exact, x.bound) if isinstance(x, Value) else (True, 4)
            type_ = x.type if isinstance(x, Value) else x
            inner.values.append(Value(f"i{i}", type_, exact, bound))
        given = list(inner.values)
        if first:
            inner.call(first[0], [given[i] for i in first[1]])
        inner.grow(inner_operations(self), self.integer(1, 4))
        outputs = [inner.coerced(t, given) for t in like]
        outputs += [inner.pick("f") for _ in range(extra)]
        block = Block(tuple(inner.calls), tuple(v.name for v in outputs))
        return block, [v.exact for v in outputs], [v.type for v in outputs]

    def coerced(self, type_: Type, given: Sequence[Value]) -> Value:
        """A value of `type_`, made of a given one if need be; bounded by `BOUND`."""
        fits = [v for v in reversed(self.values) if v.type == type_]
        value = self.one_of(fits)
        if type_.dtype == "f":
            newest = self.pick("f")
            if newest.type != type_ and self.boolean():
                value = self.call("fold", [value, newest])[0]
            value = self.squashed(value)[0]
        return value


FLOW = ("scan", "layers", "cond", "while_", "vmap", "remat", "jit", "custom")
OFTEN = ("dense", "dot", "attention", "transpose", "reshape", "dropout", "scatter_add")


def operations(builder: Builder) -> list[str]:
    """Names to choose from: what steps are made of stands there three times, what the
    program favours four times."""
    return [*builder.table, *2 * OFTEN, *2 * FLOW, *3 * tuple(builder.favoured)]


def inner_operations(builder: Builder) -> list[str]:
    """The operations of a body; control flow only near the surface."""
    return [n for n in operations(builder) if builder.depth < 1 or n not in FLOW]
