"""The only place that knows JAX versions and JAX's private modules.

In: JAX of one version. Out: the same functions for each. Every one hides one difference
between JAX 0.10, 0.11 and 0.12, or one private name.
"""

from shardfn._core.compat.arrays import (
    CONCRETE_ARRAYS as CONCRETE_ARRAYS,
)
from shardfn._core.compat.arrays import (
    JIT_REFUSES_DELETED as JIT_REFUSES_DELETED,
)
from shardfn._core.compat.arrays import (
    abstract as abstract,
)
from shardfn._core.compat.arrays import (
    any_deleted as any_deleted,
)
from shardfn._core.compat.arrays import (
    aval_like as aval_like,
)
from shardfn._core.compat.arrays import (
    aval_of as aval_of,
)
from shardfn._core.compat.arrays import (
    cast_varying as cast_varying,
)
from shardfn._core.compat.arrays import (
    checks_types as checks_types,
)
from shardfn._core.compat.arrays import (
    is_key as is_key,
)
from shardfn._core.compat.arrays import (
    is_traced as is_traced,
)
from shardfn._core.compat.arrays import (
    put as put,
)
from shardfn._core.compat.arrays import (
    register_array as register_array,
)
from shardfn._core.compat.arrays import (
    type_text as type_text,
)
from shardfn._core.compat.arrays import (
    varying_alike as varying_alike,
)
from shardfn._core.compat.arrays import (
    varying_axes as varying_axes,
)
from shardfn._core.compat.arrays import (
    with_weak_type as with_weak_type,
)
from shardfn._core.compat.called_bodies import (
    CUSTOM as CUSTOM,
)
from shardfn._core.compat.called_bodies import (
    called_body as called_body,
)
from shardfn._core.compat.called_bodies import (
    calling as calling,
)
from shardfn._core.compat.called_bodies import (
    inlined_body as inlined_body,
)
from shardfn._core.compat.called_bodies import (
    platform_branch as platform_branch,
)
from shardfn._core.compat.called_bodies import (
    traced_lowering as traced_lowering,
)
from shardfn._core.compat.equations import (
    bind_remat as bind_remat,
)
from shardfn._core.compat.equations import (
    is_type_cast as is_type_cast,
)
from shardfn._core.compat.equations import (
    rebind as rebind,
)
from shardfn._core.compat.equations import (
    summed_dimensions as summed_dimensions,
)
from shardfn._core.compat.equations import (
    untyped_equation as untyped_equation,
)
from shardfn._core.compat.equations import (
    with_line_of as with_line_of,
)
from shardfn._core.compat.jaxprs import (
    close_jaxpr as close_jaxpr,
)
from shardfn._core.compat.jaxprs import (
    is_debug_effect as is_debug_effect,
)
from shardfn._core.compat.jaxprs import (
    is_internal_ref_effect as is_internal_ref_effect,
)
from shardfn._core.compat.jaxprs import (
    open_jaxpr as open_jaxpr,
)
from shardfn._core.compat.jaxprs import (
    scan_counts as scan_counts,
)
from shardfn._core.compat.jaxprs import (
    traced_equation as traced_equation,
)
from shardfn._core.compat.jaxprs import (
    with_equations as with_equations,
)
from shardfn._core.compat.jaxprs import (
    without_dead_code as without_dead_code,
)
from shardfn._core.compat.jaxprs import (
    without_refs as without_refs,
)
from shardfn._core.compat.mapped import (
    DimAxes as DimAxes,
)
from shardfn._core.compat.mapped import (
    MappedPart as MappedPart,
)
from shardfn._core.compat.mapped import (
    Pmapped as Pmapped,
)
from shardfn._core.compat.mapped import (
    is_mapped as is_mapped,
)
from shardfn._core.compat.mapped import (
    mapped_part as mapped_part,
)
from shardfn._core.compat.mapped import (
    named_axes as named_axes,
)
from shardfn._core.compat.mapped import (
    pmapped as pmapped,
)
from shardfn._core.compat.mapped import (
    unbound_axis as unbound_axis,
)
from shardfn._core.compat.meshes import (
    has_types as has_types,
)
from shardfn._core.compat.meshes import (
    is_explicit as is_explicit,
)
from shardfn._core.compat.meshes import (
    is_typed as is_typed,
)
from shardfn._core.compat.meshes import (
    mesh_lacking as mesh_lacking,
)
from shardfn._core.compat.meshes import (
    untyped_array as untyped_array,
)
from shardfn._core.compat.meshes import (
    untyped_axes_of_one_device as untyped_axes_of_one_device,
)
from shardfn._core.compat.meshes import (
    untyped_value as untyped_value,
)
from shardfn._core.compat.meshes import (
    without_mesh as without_mesh,
)
from shardfn._core.compat.platforms import (
    automatic_axes as automatic_axes,
)
from shardfn._core.compat.platforms import (
    bound_platform as bound_platform,
)
from shardfn._core.compat.platforms import (
    distributed_client as distributed_client,
)
from shardfn._core.compat.platforms import (
    dtypes_without_sum as dtypes_without_sum,
)
from shardfn._core.compat.platforms import (
    fuses_producers as fuses_producers,
)
from shardfn._core.compat.platforms import (
    hides_network as hides_network,
)
from shardfn._core.compat.platforms import (
    hoists_gathers as hoists_gathers,
)
from shardfn._core.compat.platforms import (
    indexes_memory as indexes_memory,
)
from shardfn._core.compat.platforms import (
    lets_sums_wait as lets_sums_wait,
)
from shardfn._core.compat.platforms import (
    loses_clamps as loses_clamps,
)
from shardfn._core.compat.platforms import (
    lowered_for as lowered_for,
)
from shardfn._core.compat.platforms import (
    merges_gathers as merges_gathers,
)
from shardfn._core.compat.platforms import (
    misjudges_network as misjudges_network,
)
from shardfn._core.compat.platforms import (
    platform_of as platform_of,
)
from shardfn._core.compat.platforms import (
    promoted_dtype as promoted_dtype,
)
from shardfn._core.compat.platforms import (
    reads_inside_matmuls as reads_inside_matmuls,
)
from shardfn._core.compat.platforms import (
    scatters_tiles as scatters_tiles,
)
from shardfn._core.compat.platforms import (
    sent_as as sent_as,
)
from shardfn._core.compat.platforms import (
    sums_in_pieces as sums_in_pieces,
)
from shardfn._core.compat.platforms import (
    times_transfers as times_transfers,
)
from shardfn._core.compat.primitives import (
    ADDITIONS as ADDITIONS,
)
from shardfn._core.compat.primitives import (
    UNREDUCED_COLLECTIVES as UNREDUCED_COLLECTIVES,
)
from shardfn._core.compat.primitives import (
    attention_heads_first as attention_heads_first,
)
from shardfn._core.compat.primitives import (
    attention_is_causal as attention_is_causal,
)
from shardfn._core.compat.primitives import (
    beta_types_vary as beta_types_vary,
)
from shardfn._core.compat.primitives import (
    cond_p as cond_p,
)
from shardfn._core.compat.primitives import (
    primitive as primitive,
)
from shardfn._core.compat.primitives import (
    primitives as primitives,
)
from shardfn._core.compat.primitives import (
    remat_p as remat_p,
)
from shardfn._core.compat.primitives import (
    scan_p as scan_p,
)
from shardfn._core.compat.primitives import (
    while_p as while_p,
)
from shardfn._core.compat.settings import (
    HIDING_FLAGS as HIDING_FLAGS,
)
from shardfn._core.compat.settings import (
    at_top_level as at_top_level,
)
from shardfn._core.compat.settings import (
    broadcasts_ranks as broadcasts_ranks,
)
from shardfn._core.compat.settings import (
    checks_values as checks_values,
)
from shardfn._core.compat.settings import (
    compiler_settings as compiler_settings,
)
from shardfn._core.compat.settings import (
    configuration as configuration,
)
from shardfn._core.compat.settings import (
    evaluating as evaluating,
)
from shardfn._core.compat.settings import (
    hiding_flags as hiding_flags,
)
from shardfn._core.compat.settings import (
    is_tracing as is_tracing,
)
from shardfn._core.compat.settings import (
    jit_enabled as jit_enabled,
)
from shardfn._core.compat.settings import (
    refuses_transfers as refuses_transfers,
)
from shardfn._core.compat.source_lines import (
    BACKWARD as BACKWARD,
)
from shardfn._core.compat.source_lines import (
    FORWARD as FORWARD,
)
from shardfn._core.compat.source_lines import (
    PACKAGE as PACKAGE,
)
from shardfn._core.compat.source_lines import (
    as_user_code as as_user_code,
)
from shardfn._core.compat.source_lines import (
    derivatives as derivatives,
)
from shardfn._core.compat.source_lines import (
    is_repeated as is_repeated,
)
from shardfn._core.compat.source_lines import (
    summarize as summarize,
)
from shardfn._core.compat.topologies import (
    are_described as are_described,
)
from shardfn._core.compat.topologies import (
    lacks_memories as lacks_memories,
)
from shardfn._core.compat.topologies import (
    lower_on as lower_on,
)
from shardfn._core.compat.topologies import (
    with_cudnn as with_cudnn,
)
from shardfn._core.compat.topologies import (
    without_devices as without_devices,
)
