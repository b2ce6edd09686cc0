"""shardfn: fully sharded training steps in JAX, from an unedited step.

What a training program needs is here, and what it reads. The author of a rule finds the
rest in `shardfn.rules`; plans, reports and machines are in `shardfn.analysis`,
checkpoints and exports in `shardfn.storage`, `assert_parity` in `shardfn.testing`.
"""

from shardfn import analysis as analysis, rules as rules
from shardfn._api.fully_shard import fully_shard as fully_shard
from shardfn._api.local_step import LocalStep as LocalStep
from shardfn._api.sharded_step import ShardedStep as ShardedStep
from shardfn._api.tuning.candidates import Tuning as Tuning
from shardfn._api.tuning.tune import tune as tune
from shardfn._core.constraint import constrain as constrain, replicate as replicate
from shardfn._core.errors import (
    InexactSignWarning as InexactSignWarning,
    OffloadWarning as OffloadWarning,
    ReplicatedComputeWarning as ReplicatedComputeWarning,
    ResidualWarning as ResidualWarning,
    ShardingError as ShardingError,
    StaticArgumentWarning as StaticArgumentWarning,
    UnsupportedPrimitiveWarning as UnsupportedPrimitiveWarning,
    UnusedAxisWarning as UnusedAxisWarning,
    VerificationWarning as VerificationWarning,
)
from shardfn._core.make_rule import make_rule as make_rule
from shardfn._core.op_sharding_rule import (
    OpShardingRule as OpShardingRule,
    factor_names as factor_names,
)
from shardfn._core.processes import assert_processes_agree as assert_processes_agree
from shardfn._core.quantized_leaf import (
    QuantizedLeaf as QuantizedLeaf,
    quantize_leaves as quantize_leaves,
)
from shardfn._core.residual import (
    Residual as Residual,
    error_feedback as error_feedback,
    zero_residuals as zero_residuals,
)
from shardfn._core.rule_registry import (
    LocalOp as LocalOp,
    register_rule as register_rule,
)
from shardfn.analysis.collective import Collective as Collective
from shardfn.analysis.plan import Plan as Plan
from shardfn.analysis.report import Report as Report
from shardfn.analysis.verification import (
    LineCheck as LineCheck,
    Verification as Verification,
)

__version__ = "0.1.0"
