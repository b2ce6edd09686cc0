"""Steps that update modules of flax.nnx in place, as under `nnx.jit`.

In: a step, and a call with modules among its arguments. Out: a pure function of their
variables, which returns the new ones; and after the call, the caller's own modules with
the new values.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey

from shardfn._api.call_arguments import by_position, parameter_names
from shardfn._core.call_arguments import (
    Named,
    Position,
    Rest,
    StateArguments,
    by_place,
    parts,
    rejoined,
    without,
)
from shardfn._core.errors import ShardingError, called, listed, step_name
from shardfn._core.leaves import path_name
from shardfn._core.optional import flax_nnx
from shardfn.storage._shared_variables import shared


def has_modules(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an argument is a module, an optimizer, metrics or keys of nnx."""
    nnx = flax_nnx()
    if nnx is None:
        return False
    return any(isinstance(x, nnx.Pytree) for x in (*args, *named.values()))


def _is_module(x: Any) -> bool:
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree)


@jax.tree_util.register_pytree_with_keys_class
class Variables(dict[str, Any]):
    """The variables of modules, each once, by the names of the arguments; what the
    modules are besides; and the variables of other arguments that a step has written
    into, by their names."""

    def __init__(
        self, states: Mapping[str, Any], graph: Any, written: tuple[str, ...] = ()
    ) -> None:
        super().__init__(states)
        self.graph, self.written = graph, written

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[Any, ...]]:
        """The variables of each argument."""
        form = tuple(self), self.graph, self.written
        return [(DictKey(k), x) for k, x in self.items()], form

    @classmethod
    def tree_unflatten(cls, form: tuple[Any, ...], states: Sequence[Any]) -> Any:
        names, graph, written = form
        return cls(dict(zip(names, states, strict=True)), graph, written)


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class _Same:
    """Stands in a result for the module at some place among those given."""

    place: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call with modules.

    Attributes:
      modules: those of the caller, by the names of their arguments.
      positions: where they stand among the arguments.
      others: the other arguments.
    """

    modules: dict[str, Any]
    positions: tuple[Position, ...]
    others: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the pure function takes for it, by position and by name."""
        others = list(self.others)
        named = others.pop() if others and isinstance(others[-1], Named) else {}
        return (_variables(self.modules), *others), dict(named)

    def pure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of variables, which returns them first."""
        return pure(step, self.positions, tuple(self.modules))

    def check_others(self, out: Any) -> None:
        """Raises if what the step does to another argument would be lost: a module in
        it, or a variable that it writes into.

        Args:
          out: what the pure function returns, with abstract values.
        """
        nnx: Any = flax_nnx()
        found = jax.tree.leaves(self.others, is_leaf=_is_module)
        inside = [type(x).__name__ for x in found if isinstance(x, nnx.Pytree)]
        if inside:
            raise ShardingError(
                f"{step_name()} updates modules in place, and another argument holds "
                f"{listed(list(dict.fromkeys(inside)))}.\n{called()}"
                "Pass each module, optimizer, metric and set of keys as an argument of "
                "its own."
            )
        if out[0].written:
            raise ShardingError(
                f"{step_name()} writes into {listed(out[0].written)}, of an argument "
                f"that is no module, and that would be lost.\n{called()}"
                "Return what is new, or pass the module itself."
            )

    def comes_back(self, out: Any) -> bool:
        """Whether a step is a function of pytrees: it returns all of its modules, or
        others like them, and none of them share variables.

        Args:
          out: what the pure function returns, with abstract values.
        """
        results = [tree for _, tree in parts(out[1])]
        like = {jax.tree.structure(tree) for tree in results}
        nodes = _nodes(self.modules)
        same = {id(nodes[x.place]) for x in results if isinstance(x, _Same)}
        returned = (
            id(x) in same or jax.tree.structure(x) in like
            for x in self.modules.values()
        )
        trees = map(jax.tree.structure, self.modules.values())
        if any(map(jax.tree_util.treedef_is_leaf, trees)):  # made with pytree=False
            return False
        return not shared(self.modules) and all(returned)

    def hand_back(self, result: tuple[Variables, Any]) -> Any:
        """Gives the caller's modules their new values; what the step returned, in which
        they are the caller's own again."""
        nnx: Any = flax_nnx()
        new, out = result
        own = _nodes(self.modules)
        nnx.update(self.modules, nnx.State(dict(new)))
        return jax.tree.map(
            lambda x: own[x.place] if isinstance(x, _Same) else x,
            out,
            is_leaf=lambda x: isinstance(x, _Same),
        )


def call_of(step: Callable[..., Any], args: Sequence[Any], named: Any) -> Call:
    """A call of a step with modules."""
    args, names = tuple(by_position(step, args, named)), parameter_names(step)
    found = {p: x for p, x in by_place(args).items() if _is_module(x)}
    modules = {
        names[p] if isinstance(p, int) and p < len(names) else str(p): x
        for p, x in found.items()
    }
    return Call(modules, tuple(found), tuple(without(args, found)))


def pure(
    step: Callable[..., Any], positions: tuple[Position, ...], names: tuple[str, ...]
) -> Callable[..., Any]:
    """A step as a function of variables, which returns them first.

    Args:
      step: the step that updates modules in place.
      positions: where the modules stand among its arguments.
      names: what these arguments are called.
    """
    nnx: Any = flax_nnx()

    def run(variables: Variables, *others: Any, **named: Any) -> Any:
        modules = nnx.merge(variables.graph, nnx.State(dict(variables)))
        places = {id(node): place for place, node in enumerate(_nodes(modules))}
        rest = Rest(
            (*others, Named(named)) if named else others, StateArguments(positions)
        )
        args = rejoined([modules[name] for name in names], rest)
        last = args[-1] if args and isinstance(args[-1], Named) else {}
        given = [v for x in (*others, *named.values()) for v in _values(x)]
        out = step(*(args[:-1] if last else args), **last)
        written = _written(given)
        return _variables(modules, written), jax.tree.map(
            lambda x: _Same(places[id(x)]) if id(x) in places else x,
            out,
            is_leaf=lambda x: id(x) in places,
        )

    functools.update_wrapper(run, step, updated=())
    parameters = [inspect.Parameter("modules", inspect.Parameter.POSITIONAL_ONLY)]
    own = list(inspect.signature(step).parameters.values())
    parameters += [p for i, p in enumerate(own) if not {i, p.name} & set(positions)]
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore
    return run


def _values(tree: Any) -> list[tuple[str, Any, list[Any]]]:
    """The variables in other arguments than modules, as those of an `nnx.State`: their
    names, and what they have now."""
    nnx: Any = flax_nnx()
    found, _ = jax.tree.flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [
        (f"{type(x).__name__} {path_name(path)}".strip(), x, jax.tree.leaves(x))
        for path, x in found
        if isinstance(x, nnx.Variable)
    ]


def _written(given: Sequence[tuple[str, Any, list[Any]]]) -> tuple[str, ...]:
    """The names of the variables that have other values by now."""
    return tuple(
        name
        for name, variable, values in given
        if any(map(operator.is_not, values, jax.tree.leaves(variable)))
    )


def _variables(modules: Mapping[str, Any], written: tuple[str, ...] = ()) -> Variables:
    nnx: Any = flax_nnx()
    graph, state = nnx.split(dict(modules), graph=True)
    return Variables(state, graph, written)


def _nodes(modules: Mapping[str, Any]) -> list[Any]:
    """The modules and the modules in them, in the order of their paths."""
    nnx: Any = flax_nnx()
    found = nnx.iter_graph(dict(modules), graph=True)
    return [x for _, x in found if isinstance(x, nnx.Pytree)]
