"""The table of the options that may differ from leaf to leaf of the state.

In: nothing. Out: `LeafOptions`, a row per option: what users may pass, the default,
which values it takes, who reads it, and what it does. The signature and docstring of
`fully_shard`, the attributes of `LeafControl`, the flags of the command line and the
docs' table are made of the rows; a new option is one row and its reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypedDict, TypeVar, get_args, get_type_hints

from jax.typing import DTypeLike

from shardfn._core.option_values import (
    ACCUMULATE,
    AXES,
    COUNT,
    OFFLOAD,
    PATTERNS,
    POSITIVE,
    PREFETCH,
    RESHARD,
    ROUNDING,
    STATIONARY,
    WIRE_DTYPE,
    Accumulate,
    Offload,
    Option,
    Prefetch,
    ReshardAfterForward,
    Stationary,
)
from shardfn._core.quantized import Rounding

T = TypeVar("T")

PerLeaf = T | Mapping[str, T]
"""A value for all leaves, or values by path pattern."""


class LeafOptions(TypedDict, total=False):
    """The options of `fully_shard` that may differ from leaf to leaf of the state."""

    reshard_after_forward: Annotated[
        PerLeaf[ReshardAfterForward],
        Option(
            default="auto",
            values=RESHARD,
            read_by=(
                "_schedule.keep_gathered",
                "_schedule.share_gathers",
                "_schedule.loop_invariants",
            ),
            doc="""Whether the backward pass gathers a parameter again. True: yes; a
            parameter is whole only while a layer uses it, and twice its bytes are
            gathered. False: what the forward pass gathered is kept; half the bytes, and
            all such parameters are whole at the end of the forward pass (a scan over
            layers stacks them). A number `k` that divides the devices of the axis: each
            device keeps a `k`-th, and the backward pass gathers within groups of `k`
            neighbours, such as those of one host: `(k-1)/k` of a parameter's bytes,
            over their links alone, and a `k`-th of all such parameters in memory
            between the passes. "auto", the default: only if more than its own bytes are
            gathered between the two uses, so not for the last layer or the head; and
            within one pass, such as for a table that is tied to the head, only if what
            is kept would be more than a tenth of them. Pass True if memory is short,
            False if memory is left and transfers are slow.""",
        ),
    ]
    stationary: Annotated[
        PerLeaf[Stationary],
        Option(
            default="auto",
            values=STATIONARY,
            read_by=("_lowering.plan_jaxpr",),
            doc="""Whether a parameter stays where it is stored and the activations that
            meet it move to it, as in tensor parallelism, instead of the parameter being
            gathered. True: yes; its gradient is in no collective, and activations, or
            their sums, are gathered, exchanged and reduce-scattered around it. False:
            no. "auto", the default: if the whole step then sends a fifth less, and at
            least 256 KiB per device. That is where activations are smaller than the
            parameter: few rows, tables with few lookups, decoding. A leaf that is
            stored padded or flattened is gathered in any case. Pass True for a leaf
            that should stay in any case, False for one that should not.""",
        ),
    ]
    gather_dtype: Annotated[
        PerLeaf[DTypeLike | Mapping[str, DTypeLike] | None],
        Option(
            default=None,
            values=WIRE_DTYPE,
            read_by=("_schedule.wire_dtypes", "_schedule.quantize_moves"),
            doc="""Dtype that parameters are cast to before they are gathered, and back
            behind it. None, the default: as the step has them. bfloat16: half the bytes
            of a step in float32, whose weights are then rounded before it multiplies
            with them; parameters that the step itself casts to this or a narrower dtype
            are not touched. int8, float8_e4m3fn or float8_e5m2: half of bfloat16's
            bytes. Parameters are then quantized on their shards, in blocks that have a
            scale each, and read in the step's dtype behind the gather; the update
            starts from the exact ones, and derivatives do not see it. Values of fewer
            than 65,536 elements stay exact, unless their very leaf is named, and so do
            gathers of the update. `{"dcn": "int8"}` quantizes over that mesh axis
            alone, by path `{"*": {"dcn": "int8"}}`. Give one if gathers take longer
            than the matmuls beside them, and the rounding does no harm.""",
        ),
    ]
    reduce_dtype: Annotated[
        PerLeaf[DTypeLike | Mapping[str, DTypeLike] | None],
        Option(
            default=None,
            values=WIRE_DTYPE,
            read_by=(
                "_schedule.wire_dtypes",
                "_schedule.widen_reductions",
                "_schedule.quantize_moves",
            ),
            doc="""Dtype that gradients are summed over devices in. None, the default:
            as the step makes them. float32, for gradients in bfloat16: they leave their
            matrix product as float32 and are rounded after the sum, if at all, for
            twice the bytes of a reduce-scatter. A narrower one than the step's: half
            the bytes, and each device's term is rounded. int8, float8_e4m3fn or
            float8_e5m2: half of bfloat16's bytes. Terms are then quantized in blocks
            that have a scale each, exchanged by an all-to-all, and summed in float32
            once, with one rounding per term. What every device gets whole, such as the
            sum over hosts where the state is sharded within each, is then gathered in
            the same dtype, which rounds the sum, too. Values of fewer than 65,536
            elements stay exact, unless their very leaf is named. A dtype that is not
            quantized also counts for sums of activations behind a stationary leaf that
            is split along what it contracts. `{"dcn": "int8"}` quantizes over that mesh
            axis alone, by path `{"*": {"dcn": "int8"}}`. Give a wider one for accuracy
            over many devices, a narrower one for slow links.""",
        ),
    ]
    reduce_rounding: Annotated[
        PerLeaf[Rounding],
        Option(
            default="nearest",
            values=ROUNDING,
            read_by=("_schedule.quantize_moves",),
            doc="""How terms of gradients are rounded that `reduce_dtype` quantizes.
            "nearest", the default: to the nearest value, so that small elements of a
            block are always lost. "stochastic": up or down by chance, such that the
            average is the term itself, with more noise. Chance is a hash of the term's
            bits, its place and its device: the same step on the same values rounds the
            same way, and no key is held.""",
        ),
    ]
    quantize_block: Annotated[
        PerLeaf[int],
        Option(
            default=128,
            values=POSITIVE,
            read_by=("_schedule.quantize_moves",),
            doc="""How many neighbours share a scale where `gather_dtype` or
            `reduce_dtype` quantize: 128 elements by default, along the last dimension
            that blocks divide on each device. Fewer round less and have more scales, of
            two bytes each: 1.6% more bytes with 128. If it divides none, blocks are of
            the largest number above half of it that does, or the value moves as it is,
            which `plan.explain` says.""",
        ),
    ]
    accumulate: Annotated[
        PerLeaf[Accumulate],
        Option(
            default="auto",
            values=ACCUMULATE,
            read_by=("_propagation.loop_carries", "_propagation.decide_node"),
            doc="""How a scan that adds up a gradient, such as one over microbatches,
            holds it. "scatter": each iteration reduce-scatters its gradient and adds it
            to a shard; the shards are all-reduced over other mesh axes once, after the
            scan. "defer": each device adds up its own gradients, as large as the
            parameter, and they are reduce-scattered once: for `k` microbatches a `k`-th
            of the bytes. "auto", the default: deferred if all gradients of the scan
            together fit in 64 MiB. Pass "defer" if memory is left for whole gradients,
            "scatter" if it is not.""",
        ),
    ]
    prefetch: Annotated[
        PerLeaf[Prefetch],
        Option(
            default="auto",
            values=PREFETCH,
            read_by=("_schedule.prefetch", "_schedule.limit_all_gathers"),
            doc="""How many layers ahead a scan over layers gathers, forward and
            backward. 0: each iteration gathers its own, and the compiler overlaps what
            it can. More: the loop carries the coming layers' gathered weights, so that
            their gathers can run while a layer computes, for as many layers' weights of
            memory and as many more gathers of a layer per pass, whose results the last
            iterations drop. "first": one layer ahead, but only weights of the layer's
            first products: of those that, in the order of the program, come before one
            that reads what another has made, such as the projections in front of
            attention. What an iteration begins with is then there, at the price of
            these weights alone. "auto", the default: on Hopper GPUs of several hosts,
            loops that can hide it gather what comes before a layer's largest weights
            one layer ahead, and what is small, as they do with "first". Those that send
            small parts gather ahead what "first" says; others gather as with 0. In
            unrolled layers a number is a bound, which takes no further gathers: at most
            so many layers' weights, or without `jax.checkpoint` so many weights, are
            gathered or in flight beside those in use; 0, "first" and "auto" bound
            nothing. Try "first", then 1, if a report says that the device waits for
            gathers.""",
        ),
    ]
    bucket_bytes: Annotated[
        PerLeaf[int],
        Option(
            default=0,
            values=COUNT,
            read_by=("_schedule.bucket_kinds",),
            doc="""How many bytes of whole values one collective of several small leaves
            of a layer may move; larger leaves travel alone, and are not copied. 0, the
            default: each leaf has a collective of its own, which XLA may still combine.
            More: fewer collectives, for the same bytes and the same results to the last
            bit, but joined leaves are copied once more on either side, and the first
            gathers and the last sums wait for the others. Leaves with different values
            of it, or in different dtypes, do not move together, nor those that other
            mesh axes split. Pass `2**20` or so if a step has many small leaves, whose
            latency counts.""",
        ),
    ]
    shard: Annotated[
        PerLeaf[str | tuple[str, ...] | Mapping[str, int] | Literal[False] | None],
        Option(
            default=None,
            values=AXES,
            read_by=("storage._layout",),
            doc="""Mesh axes over which leaves of the state are stored split, one
            dimension per axis. None, the default: the last of `axis`; parameters,
            gradients and optimizer state are then all sharded (ZeRO-3; hybrid if `axis`
            has more). False: every device holds the whole leaf; for all leaves, whole
            gradients are all-reduced. `{"params": False}` shards only the optimizer
            state: no gather in forward and backward, gradients are reduce-scattered,
            and new parameters all-gathered in their stored dtype (ZeRO-2, and with
            `accumulate="defer"` ZeRO-1). `{"params": "data", "opt_state": ("replica",
            "data")}` gathers over the one axis and updates over both. `{"table":
            {"data": -1}}` also asks for the dimension that is split. Change it if
            parameters fit whole, or if a leaf is better split on another dimension.""",
        ),
    ]
    offload: Annotated[
        PerLeaf[Offload | None],
        Option(
            default=None,
            values=OFFLOAD,
            read_by=("storage._stored_layout",),
            doc="""The memory that leaves of the state live in. None, the default: the
            device's. "host": the pinned memory of the host, as in ZeRO-Offload, from
            where a step takes what it needs, and where it puts what it made of it;
            `{"opt_state/*": "host"}` frees what an optimizer's moments take. Where an
            optimizer works element by element, as Adam does, they come and go in blocks
            of rows, so that the device holds a block; other leaves come as a whole.
            Leaves of fewer than `min_size` elements stay. A size such as "70GiB": of
            these leaves only what has to go for the step to take at most so much of
            each device, by the plan's estimate: moments first, then master weights,
            then parameters. "auto": the same with the memory of the devices, or of the
            target of a report. It is chosen when the step is first planned, as that
            needs the batch, and is then how the state is stored. Use it if the state
            does not fit; what is there crosses the host's link in every step.""",
        ),
    ]
    per_device_state: Annotated[
        Sequence[str],
        Option(
            default=False,
            values=PATTERNS,
            read_by=("storage._layout", "_api.plain_step"),
            doc="""Path patterns of leaves that each device keeps for itself, as under
            `jax.pmap`; none by default. They are for batch statistics of a step that is
            written per device and does not average them. They have a leading dimension
            of devices, which `init` and `shard` add and the step does not see.""",
        ),
    ]


def _options() -> dict[str, Option]:
    rows = get_type_hints(LeafOptions, include_extras=True)
    return {
        name: replace(get_args(row)[1], name=name, type=get_args(row)[0])
        for name, row in rows.items()
    }


LEAF_OPTIONS = _options()
"""The rows of the table by name."""
