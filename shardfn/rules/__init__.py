"""The op sharding rules, one file per family. Importing this registers them.

In: an equation of a jaxpr. Out: its `OpShardingRule`: which dimensions of operands and
results belong together. What the author of a rule needs is public here: see the page
Custom primitives. Imports `_core`.
"""

from shardfn._core.make_rule import make_rule as make_rule
from shardfn._core.op_sharding_rule import (
    OpShardingRule as OpShardingRule,
    factor_names as factor_names,
)
from shardfn._core.rule_registry import (
    LocalOp as LocalOp,
    register_rule as register_rule,
    rule_of as rule_of,
)
from shardfn.rules import (
    casting as casting,
    contraction as contraction,
    elementwise as elementwise,
    fused_attention as fused_attention,
    indexing as indexing,
    linalg as linalg,
    owned_rows as owned_rows,
    pallas_calls as pallas_calls,
    quantized as quantized,
    random as random,
    rearranging as rearranging,
    reduction as reduction,
    reshape as reshape,
    slicing as slicing,
    sorting as sorting,
    windowed as windowed,
)
from shardfn.rules._factors import fresh_names as fresh_names
from shardfn.rules.elementwise import elementwise_rule as elementwise_rule
from shardfn.rules.kernels import partition_like as partition_like
from shardfn.rules.slicing import partly_changed as partly_changed

__all__ = [
    "LocalOp",
    "OpShardingRule",
    "elementwise_rule",
    "factor_names",
    "fresh_names",
    "make_rule",
    "partition_like",
    "partly_changed",
    "register_rule",
    "rule_of",
]
