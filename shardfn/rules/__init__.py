"""The op sharding rules, one file per family. Importing this registers them.

In: an equation of a jaxpr. Out: its `OpShardingRule`: which dimensions of operands and
results belong together. What the author of a rule needs is public here: see the page
Custom primitives. Imports `_core`.
"""

from shardfn._core.make_rule import make_rule as make_rule
from shardfn._core.op_sharding_rule import OpShardingRule as OpShardingRule
from shardfn._core.op_sharding_rule import factor_names as factor_names
from shardfn._core.rule_registry import LocalOp as LocalOp
from shardfn._core.rule_registry import register_rule as register_rule
from shardfn._core.rule_registry import rule_of as rule_of
from shardfn.rules import casting as casting
from shardfn.rules import contraction as contraction
from shardfn.rules import elementwise as elementwise
from shardfn.rules import fused_attention as fused_attention
from shardfn.rules import indexing as indexing
from shardfn.rules import linalg as linalg
from shardfn.rules import owned_rows as owned_rows
from shardfn.rules import quantized as quantized
from shardfn.rules import random as random
from shardfn.rules import rearranging as rearranging
from shardfn.rules import reduction as reduction
from shardfn.rules import reshape as reshape
from shardfn.rules import slicing as slicing
from shardfn.rules import sorting as sorting
from shardfn.rules import windowed as windowed
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
