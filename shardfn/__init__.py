"""shardfn: fully sharded training steps in JAX, from an unedited step."""

from shardfn._constrain import constrain as constrain
from shardfn._constrain import replicate as replicate
from shardfn._errors import ShardingError as ShardingError
from shardfn._errors import (
    UnsupportedPrimitiveWarning as UnsupportedPrimitiveWarning,
)
from shardfn._errors import VerificationWarning as VerificationWarning
from shardfn._fully_shard import fully_shard as fully_shard
from shardfn._local_step import LocalStep as LocalStep
from shardfn._plan import Collective as Collective
from shardfn._plan import Plan as Plan
from shardfn._report import Report as Report
from shardfn._rule import LocalOp as LocalOp
from shardfn._rule import OpShardingRule as OpShardingRule
from shardfn._rule import factor_names as factor_names
from shardfn._rule import make_rule as make_rule
from shardfn._rule import register_rule as register_rule
from shardfn._sharded_step import ShardedStep as ShardedStep
from shardfn._verification import LineCheck as LineCheck
from shardfn._verification import Verification as Verification
