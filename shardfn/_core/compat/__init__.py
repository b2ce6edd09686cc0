"""The only place that knows JAX versions and JAX's private modules.

In: JAX of one version. Out: the same functions for each. Every one hides one difference
between JAX 0.10, 0.11 and 0.12, or one private name.
"""

from shardfn._core.compat.arrays import (
    CONCRETE_ARRAYS as CONCRETE_ARRAYS,
    JIT_REFUSES_DELETED as JIT_REFUSES_DELETED,
    abstract as abstract,
    any_deleted as any_deleted,
    aval_like as aval_like,
    aval_of as aval_of,
    cast_varying as cast_varying,
    checks_types as checks_types,
    is_key as is_key,
    is_traced as is_traced,
    put as put,
    register_array as register_array,
    type_text as type_text,
    varying_alike as varying_alike,
    varying_axes as varying_axes,
    with_weak_type as with_weak_type,
)
from shardfn._core.compat.called_bodies import (
    CUSTOM as CUSTOM,
    called_body as called_body,
    calling as calling,
    inlined_body as inlined_body,
    platform_branch as platform_branch,
    traced_lowering as traced_lowering,
)
from shardfn._core.compat.equations import (
    bind_remat as bind_remat,
    is_type_cast as is_type_cast,
    rebind as rebind,
    summed_dimensions as summed_dimensions,
    untyped_equation as untyped_equation,
    with_line_of as with_line_of,
)
from shardfn._core.compat.jaxprs import (
    close_jaxpr as close_jaxpr,
    is_check_effect as is_check_effect,
    is_debug_effect as is_debug_effect,
    is_internal_ref_effect as is_internal_ref_effect,
    open_jaxpr as open_jaxpr,
    scan_counts as scan_counts,
    takes_refs as takes_refs,
    traced_equation as traced_equation,
    with_equations as with_equations,
    without_dead_code as without_dead_code,
    without_refs as without_refs,
)
from shardfn._core.compat.kernels import (
    KernelBlocks as KernelBlocks,
    call_on_blocks as call_on_blocks,
    kernel_grid as kernel_grid,
)
from shardfn._core.compat.mapped import (
    DimAxes as DimAxes,
    MappedPart as MappedPart,
    Pmapped as Pmapped,
    is_mapped as is_mapped,
    mapped_part as mapped_part,
    named_axes as named_axes,
    pmapped as pmapped,
    unbound_axis as unbound_axis,
)
from shardfn._core.compat.meshes import (
    has_types as has_types,
    is_explicit as is_explicit,
    is_typed as is_typed,
    mesh_lacking as mesh_lacking,
    untyped_array as untyped_array,
    untyped_axes_of_one_device as untyped_axes_of_one_device,
    untyped_value as untyped_value,
    without_mesh as without_mesh,
)
from shardfn._core.compat.platforms import (
    all_reduces_little as all_reduces_little,
    automatic_axes as automatic_axes,
    bound_platform as bound_platform,
    distributed_client as distributed_client,
    dtypes_without_sum as dtypes_without_sum,
    fuses_producers as fuses_producers,
    hides_network as hides_network,
    hoists_gathers as hoists_gathers,
    indexes_memory as indexes_memory,
    known_platform as known_platform,
    lets_sums_wait as lets_sums_wait,
    loses_clamps as loses_clamps,
    lowered_for as lowered_for,
    merges_gathers as merges_gathers,
    misjudges_network as misjudges_network,
    platform_of as platform_of,
    promoted_dtype as promoted_dtype,
    reads_inside_matmuls as reads_inside_matmuls,
    scatters_tiles as scatters_tiles,
    sent_as as sent_as,
    sums_in_pieces as sums_in_pieces,
    times_transfers as times_transfers,
)
from shardfn._core.compat.primitives import (
    ADDITIONS as ADDITIONS,
    UNREDUCED_COLLECTIVES as UNREDUCED_COLLECTIVES,
    attention_heads_first as attention_heads_first,
    attention_is_causal as attention_is_causal,
    beta_types_vary as beta_types_vary,
    cond_p as cond_p,
    primitive as primitive,
    primitives as primitives,
    remat_p as remat_p,
    scan_p as scan_p,
    while_p as while_p,
)
from shardfn._core.compat.settings import (
    HIDING_FLAGS as HIDING_FLAGS,
    at_top_level as at_top_level,
    broadcasts_ranks as broadcasts_ranks,
    checks_values as checks_values,
    compiler_settings as compiler_settings,
    configuration as configuration,
    evaluating as evaluating,
    hiding_flags as hiding_flags,
    is_tracing as is_tracing,
    jit_enabled as jit_enabled,
    refuses_transfers as refuses_transfers,
)
from shardfn._core.compat.source_lines import (
    BACKWARD as BACKWARD,
    FORWARD as FORWARD,
    PACKAGE as PACKAGE,
    as_user_code as as_user_code,
    derivatives as derivatives,
    is_repeated as is_repeated,
    summarize as summarize,
)
from shardfn._core.compat.topologies import (
    are_described as are_described,
    device_known as device_known,
    lacks_memories as lacks_memories,
    lower_on as lower_on,
    with_cudnn as with_cudnn,
    without_devices as without_devices,
)
