"""The op sharding rules, one file per shape of rule. Importing this registers them."""

from shardfn._rules import cast as cast
from shardfn._rules import contraction as contraction
from shardfn._rules import elementwise as elementwise
from shardfn._rules import indexing as indexing
from shardfn._rules import linalg as linalg
from shardfn._rules import random as random
from shardfn._rules import reduction as reduction
from shardfn._rules import reshape as reshape
from shardfn._rules import shape as shape
from shardfn._rules import sorting as sorting
from shardfn._rules import windows as windows
