"""Op sharding rules: what may be split in an operation, as a frozen value.

In: nothing. Out: `OpShardingRule`. It names one *factor* per dimension, as in Shardy:
equal names are split together. `propagate` reads a rule to choose what is split, `emit`
to make the op local; `make_rule` builds one, `rule_registry` finds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardfn._core.sharding import flat_start

Dim = tuple[str, ...]
"""The factors that one dimension is made of, major to minor; usually one."""

REDUCERS = ("sum", "max", "min", "prod", "and", "or")


@dataclass(frozen=True, slots=True)
class OpShardingRule:
    """What may be split in one operation.

    Attributes:
      operands: per operand and dimension, the factors it is made of.
      results: the same for the results.
      sizes: `(factor, size)` for every factor.
      reduce: `(factor, reducer)`: with the factor split, results are unreduced.
      whole: factors that must not be split.
      linear: groups of operands. The op is linear in the operands of a group taken
        together, the others held fixed: unreduced terms may pass through.
      flat: the op may run on blocks of the flattened operands (elementwise ops, and
        reductions of every dimension).
      picks: the sums that `reduce` names have one term, on the device that holds the
        element, and zeros.
      shifts: `(factor, rows)`: with the factor split, the operands that have it are
        needed in blocks that begin so many rows earlier, around the ends.
      blocks: `(factor, rows)`: blocks of the factor have at least so many rows.
      groups: `(factor, operand)`: the operand's last dimension has the sizes of groups
        that follow each other along the factor; with it split, a group is what of it
        lies in the block.
      regroups: the op may run on blocks of the minor one of two factors of an operand's
        dimension, the blocks of each run of it one after the other.
      terms: a factor that counts the terms of a sum, "" for none. Where an operand has
        it split, operands without it are left as terms up to the op, and results
        without it are reduced right behind it.
      owned: a factor of rows that devices own, "" for none. Other operands, and results
        that are not like the first, have one element for each block of it.
      threshold: which limit decided what may be split, for people; two rules that
        differ in nothing else are equal.
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: tuple[tuple[str, int], ...]
    reduce: tuple[tuple[str, str], ...] = ()
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    flat: bool = False
    picks: bool = False
    shifts: tuple[tuple[str, int], ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()
    groups: tuple[tuple[str, int], ...] = ()
    regroups: bool = False
    terms: str = ""
    owned: str = ""
    threshold: str = field(default="", compare=False)

    def size(self, factor: str) -> int:
        """Elements of `factor`."""
        return dict(self.sizes)[factor]

    def reducer(self, factor: str) -> str | None:
        """How `factor` is reduced, or None if it is not."""
        return dict(self.reduce).get(factor)

    def major(
        self, dims: tuple[Dim, ...], dim: int, filled: frozenset[str] = frozenset()
    ) -> str | None:
        """The factor whose blocks are contiguous blocks of dimension `dim`.

        Args:
          dims: the factors of an operand or result.
          dim: the dimension.
          filled: factors that more major mesh axes split down to single elements.

        Returns:
          The factor, or None if none is left.
        """
        return _major(dims[dim], dict(self.sizes), filled)

    def dim_of(self, dims: tuple[Dim, ...], factor: str) -> int | None:
        """The dimension in which `factor` stands, or None."""
        return next((d for d, dim in enumerate(dims) if factor in dim), None)

    def is_splittable(self, factor: str, filled: frozenset[str] = frozenset()) -> bool:
        """Whether a block of `factor` is a block of every dimension it stands in, the
        factors in `filled` being split down to single elements already."""
        if factor in self.whole:
            return False
        sizes = dict(self.sizes)
        for dims in (*self.operands, *self.results):
            for dim in dims:
                if factor in dim and _major(dim, sizes, filled) != factor:
                    return False
        reduced = self.reducer(factor) is not None
        return reduced or all(
            self.dim_of(dims, factor) is not None for dims in self.results
        )

    def stands_alone(self, factor: str) -> bool:
        """Whether no dimension mixes `factor` with others, and no rows move along it:
        its blocks may be padded."""
        if factor in dict(self.shifts) or factor in dict(self.blocks):
            return False
        sizes = dict(self.sizes)
        return all(
            factor not in dim or all(f == factor or sizes[f] == 1 for f in dim)
            for dims in (*self.operands, *self.results)
            for dim in dims
        )

    def __str__(self) -> str:
        def value(dims: tuple[Dim, ...]) -> str:
            return " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims)

        text = ", ".join(map(value, self.operands))
        text = f"{text} -> {', '.join(map(value, self.results))}"
        if self.reduce:
            names = (f if op == "sum" else f"{f}:{op}" for f, op in self.reduce)
            text += f"  reduce={{{', '.join(names)}}}"
        if self.whole:
            text += f"  whole={{{', '.join(sorted(self.whole))}}}"
        if self.shifts:
            names = (f"{f}: {rows}" for f, rows in self.shifts)
            text += f"  shift={{{', '.join(names)}}}"
        if self.blocks:
            names = (f"{f}: {rows}" for f, rows in self.blocks)
            text += f"  blocks={{{', '.join(names)}}}"
        return text.strip()


def _major(dim: Dim, sizes: Mapping[str, int], filled: frozenset[str]) -> str | None:
    for factor in dim:
        if sizes[factor] != 1 and factor not in filled:
            return factor
    return None


def factor_names(count: int, start: int = 0) -> tuple[str, ...]:
    """Makes different factor names: a, b, ..., z, a1, b1, ...

    Args:
      count: how many.
      start: how many names at the beginning to leave out.

    Returns:
      The names.
    """
    return tuple(
        chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "")
        for i in range(start, start + count)
    )


def flat_factor(dim: int) -> str:
    """The factor `*k` that stands for all dimensions from `k` on, for `dim=flat(k)`."""
    return f"*{flat_start(dim)}"


def is_flat_factor(factor: str) -> bool:
    return factor.startswith("*")


def flat_factor_start(factor: str) -> int:
    """The `k` of the factor `*k`."""
    return int(factor[1:])
