"""The op sharding rules, one file per family. Importing this registers them.

In: an equation of a jaxpr. Out: its `OpShardingRule`: which dimensions of operands and
results belong together. Imports `_core`.
"""

from shardfn.rules import casting as casting
from shardfn.rules import contraction as contraction
from shardfn.rules import elementwise as elementwise
from shardfn.rules import indexing as indexing
from shardfn.rules import linalg as linalg
from shardfn.rules import random as random
from shardfn.rules import rearranging as rearranging
from shardfn.rules import reduction as reduction
from shardfn.rules import reshape as reshape
from shardfn.rules import slicing as slicing
from shardfn.rules import sorting as sorting
