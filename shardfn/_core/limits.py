"""Thresholds that decide what shardfn does, each with its unit and its reason.

In: nothing. Out: numbers. Those of plans come first, in the order in which a step
passes them; a plan names the ones that decided a line.
"""

from fractions import Fraction

# How the state is stored

PADDING_SHARE = 0.01
"""The most that padding may add to a leaf along the dimension that is split, as a part
of it; a leaf of which it would be more is stored flattened."""

FEATURE_ELEMENTS = 128
"""Elements from which on a dimension is taken for one of features, of which the first
is split; one of fewer may count layers or heads."""

# What each operation splits

FREE_ROUNDS = 5
"""Rounds of propagation in which a value's preferred shardings may change freely. After
them preferences can only grow, so that rounds that go back and forth come to an end."""

GROWTH = 2
"""How many times the elements of its stored operands a result has to exceed for these
to be gathered, rather than the result made in parts like theirs and then moved."""

FEW_SELECTED = Fraction(1, 2)
"""The most that a selection may be of what it selects from to be made of terms that are
all-reduced: that sends twice the selection, a gather once what it selects from."""

EXCHANGE_SHARE = 0.2
"""The part of what an op makes move of the batch that has to be saved for its rows to
be exchanged for parts of all rows, and back: of two devices each sends as much."""

LOOP_BYTES = 2**26
"""Bytes that a loop may hold whole beside one weight that an iteration gathers: of sums
that it carries unreduced and, by themselves, of weights that all iterations share."""

LOOP_LIVE = 2**30
"""Bytes of values that a device may have at once more, for loops to hold more than
`LOOP_BYTES`, or narrow values to be gathered: 1.3% of an H100's memory, 6% of a TPU
v5e's. A recurrent network's weights are gathered once, a large model's in each part."""

LOOP_MOST = 2**32
"""The same if they save `LOOP_WORTH` times as many, or are rows that could be
exchanged: 5% of an H100's memory."""

LOOP_WORTH = 64
"""Bytes that each of those has to save: at 50 GB/s a GiB of them takes 1.4 seconds."""

LOOP_SAVED = 0.2
"""The part of a step's bytes that has to be saved for the same."""

LOOP_UNKNOWN = 16
"""Iterations that a while loop is taken to make where that decides the same: it is
written as one because they may be many, such as tokens until the last."""

LOOP_SUMS = 2
"""How many times as large as weights their sums may be in a loop: sums of gradients in
float32 are, of weights that are gathered in bfloat16."""

REGROUP_PERMUTES = 8
"""The most permutes that rows take to become blocks of each microbatch, where devices
do not divide how many these are: a padded all-to-all has the latency of one, and sends
half of a batch where two microbatches are split over devices, whatever their number."""

# What comes from the host's memory

HOST_BLOCK_BYTES = 2**21
"""Bytes that a device holds of one leaf while an optimizer goes through it in the
host's memory, or one row if that has more. At 64 GB/s, which is PCIe 5, they take 33
microseconds. Moments of 128 MiB freed 117 MiB of a v5e with blocks of twice as many."""

# What stays

STATIONARY_PART = Fraction(1, 2)
"""The most that may move instead of a leaf, as a part of it, for the leaf to be tried:
what is nearly as large saves little, and each trial plans the step once more."""

STATIONARY_SHARE = 0.2
"""The part of a step's bytes that has to be saved for leaves to stay where they are and
what meets them to move: staying takes more collectives, each of which has a latency."""

STATIONARY_BYTES = 2**18
"""The bytes per device and step that have to be saved for the same: at 900 GB/s of an
H100's links they take a third of a microsecond, less than one collective's latency."""

ASKED_SPREAD = 6
"""How many standard deviations more than the mean a device may ask of another in a
round, where rows of tables are asked of the devices that own them: 65,536 rows, spread
evenly over 512 devices, then take a second round in one step of 400."""

ASKED_ROUNDS = 4
"""Rounds that they are taken to need where plans are compared, if not spread evenly."""

LATENCY_BYTES = 2**18
"""What a collective counts for beside its bytes where two plans are compared: however
little it sends, it takes some ten microseconds to begin on GPUs, and some on TPUs. 5
microseconds at 50 GB/s, an H100's part of the network between hosts, are 250 KB; over
the links within one host ten times as many, so this is the least that it costs."""

STATIONARY_LIVE = 2**28
"""Bytes of values that a device may have at once more than if all leaves are gathered,
for leaves to stay: what meets them is gathered of the whole batch, and a backward pass
has that of every layer. It is a hundredth of a small accelerator's memory."""

STATIONARY_GROUPS = 8
"""Groups of alike leaves of which each is tried gathered while the others stay, the
largest first: each trial plans the step once more."""

DIMENSION_SWEEPS = 3
"""How often the search for dimensions goes through the groups of leaves at most: what
one is best stored on depends on the others. A decoded Llama's took two."""

JOINED_BYTES = 2**22
"""Bytes of what meets stationary leaves up to which moves of the same kind are one
collective: at 450 GB/s, one way of an H100's links, they take ten microseconds, about
as long as a collective takes to begin."""

NARROW_SHARE = 0.2
"""The part of a weight's bytes that gathering what it is made of has to save, to do
that instead: every device then makes all of the weight, not a part."""

# Which rows that a step makes are split

GENERATED_FLOPS = 2**30
"""FLOPs of a device on whole rows that the step itself makes, from which on splitting
these is tried: fewer take microseconds. What is sent of such rows, and of what weights
make of them in parts, counts as the FLOPs that take as long (`REPEATED_FLOPS`)."""

GENERATED_SHARE = 0.2
"""The part of the time, by `REPEATED_FLOPS`, that these have to take, too, and the part
that has to be saved for rows to be split."""

GENERATED_TRIALS = 8
"""Operations that make rows of which each dimension is tried, those with most work
behind them first: each trial plans the step once more."""

REPEATED_FLOPS = 16384
"""FLOPs that a device computes while it sends a byte, where rows that a step makes by
itself are split or not. An H100 that keeps 60% of its 989 TFLOP/s computes 12,000 while
it sends one at 50 GB/s, a v5p about 2,000; with more, it has to be faster on both."""

# What is quantized on the wire

QUANTIZED_ELEMENTS = 2**16
"""Elements from which on what moves is quantized, unless an option names the very leaf:
norms and biases are smaller, change much by a rounding, and have few bytes."""

BLOCK_PART = Fraction(1, 2)
"""The least that a block may be of the elements that are asked to share a scale, where
these do not divide a shard; if no dimension has such blocks, nothing is quantized. Half
as many elements to a scale are 1.5% more bytes with blocks of 128."""

# When what is planned moves

KEPT_SHARE = Fraction(1, 10)
"""The most that weights kept for a later use in the same pass may be of what is
gathered in between, in bytes. With its tied table kept like that, GPT-1.3B on 8 H100s
sends 2.554 M instead of 2.622 M, in as much memory."""

CHAINED_BYTES = 2**20
"""Bytes from which on a gradient, a term or a weight is worth a place of its own in the
order of moves; smaller ones move when the compiler likes. Chained, the gradients of 8
unrolled layers of 1024 x 4096 on 8 H100s take 59.8 MiB instead of 144.0."""

SUMS_FLOPS = 8192
"""FLOPs of a device in a loop's iteration for each byte of its sums, from which on they
end in it in turn: about 3 for each token where a layer is computed twice."""

BALANCED_FLOPS = 5000
"""The same from which on each ends as soon as it can, and gathers begin in turn, where
a compiler misjudges the network: see docs/schedule.md."""

BALANCED_BYTES = 3 * 2**26
"""Bytes of the weights that most has to be of for that. GPT-13B, with 200 MiB, takes
0.76 to 0.81 of the time on 64 H100s; with half of that, some models take longer."""

BALANCED_SHARE = Fraction(2, 5)
"""The most of what is gathered that products of one operand may need for that."""

SUMS_PART = 2**19
"""Bytes of a sum that stay on a device, or of a weight that come from it, from which on
a collective of its own is more transfer than latency. With half of it and less,
T5-11B on 512 H100s would take 6% longer."""

SUMS_TIME = 1
"""How long the sums of a loop's iteration are taken to last, as a multiple of its
matrix products, where a plan says which of them end before the iteration does, of a
loop in which not all do; the compiler may delay the others. With 1, T5-11B on 512 H100s
takes 6.3 GiB of temporary memory in place of 6.7, in shorter steps."""

NARROW_STACKS = 0.04
"""The part of what a step takes of a device that stacks have to save to be cast behind
their loops: below, 0% to 4% of temporary memory, above, 7% to 22%. Steps vary by 3%."""

FREED_BYTES = 2**26
"""Bytes on a device of a product's operand from which on its last readers go first: a
thousandth of an H100's memory."""

DUPLICATED_BYTES = 2**27
"""Bytes on a device of a value that each product which reads it makes itself: those of
a v5p's fast memory, where smaller values may stay. With 64 MiB nothing was saved."""

DUPLICATED_COLUMNS = 256
"""With how many columns such a product may multiply the value, such as the width of a
head: two tiles of a TPU. With more, it would make each element several times."""

DUPLICATED_READS = 3
"""How many times its bytes may be read to make it: as two products do instead then."""

# What a plan warns of

REPLICATED_SHARE = 0.5
"""The part of a device's FLOPs from which on a plan says that they are the same on
every device: then more devices can make the step at most twice as fast."""

REPLICATED_FLOPS = 2**30
"""How many of them there have to be for a warning, too: fewer take microseconds."""

# What is read of the user's step, and kept of it

STATE_DEPTH = 3
"""How deep in what a step returns a state may lie: `((params, opt_state), loss)`."""

LIKE_STATE_DEPTH = 8
"""How deep in a state a tree may lie that another argument is like."""

PADDED_FEATURES = 0.125
"""The most zeros that features of rows get, as a part of them, for devices to divide
them and exchange rows: they are sent even where rows are gathered."""

REACHED_OBJECTS = 20_000
"""Objects reached from a step in search of an axis name; a step that reaches more is
taken to name any."""

BATCH_KINDS = 64
"""For how many structures and shapes of batches a step keeps what it has planned and
compiled, the last used: a program takes megabytes, and compiling it again seconds to
minutes. Lengths in buckets are fewer; as many as there are lengths are no cache."""

STATIC_KINDS = 8
"""Values of leaves that are no arrays, each compiled for, before a step warns."""

KNOWN_STATES = 16
"""How many states that calls returned or read last are known again at once: as many
alternate without a closer look. One of 600 leaves takes 50 KiB."""

KINDS = 2**14
"""Leaves of states, of all steps, that are described by one object each."""

PROCESS_SECONDS = 600
"""How long one process waits for another to plan the step that it plans itself."""

LOCAL_READINGS = 16
"""Sets of arguments that are tried as the state of a step inside `shard_map`: a trace
each where their shapes differ, of steps with up to four arguments like its states."""

# How states are made, written and read

INIT_BYTES = 2**26
"""Temporary memory for which no further program is compiled to make the leaves of a
state one after the other. 8B parameters and moments take 0.01 MiB on H100s."""

CHUNK_BYTES = 2**24
"""Largest chunk on disk: a reader that needs a part of a chunk holds all of it."""

CHUNKS_PER_SHARD = 8
"""Chunks in a shard of a flattened leaf, at least: the elements that a device needs of
the next shard are fewer than one chunk's."""

SLABS_READ = 2
"""Slabs that are read at the same time, each of a chunk or `CHUNK_BYTES`."""

READ_BYTES = 2**22
"""Of a tensor of another format that are in host memory at a time, in the dtype that
they have on disk."""

BLOCK_BYTES = 2**12
"""What a disk reads at least: fewer bytes of each row cost as much."""

FILLED_SHARE = Fraction(1, 16)
"""The most of its state that a process fills in host memory before it goes to devices,
or `READ_BYTES`: shards filled together read a row once; a larger one goes in slabs."""

LEAVES_WRITTEN = 32
"""Leaves that are written at the same time."""

FAILURE_SECONDS = 0.1
"""Between two checks of what of a write has failed."""

# How compiled programs are read

OFFLOAD_COMPILATIONS = 4
"""Programs that a report compiles at most where a bound chooses what lives on the host:
the first by the plan's estimate, the next by what the compiler said of those before."""

TPU_HEAP_HOLES = 0.1
"""What libtpu's heap takes beyond what lives in it at once by a plan, as a part of
that: holes, and what is under way. 0.02 to 0.2 in programs of scanned layers."""

OFFLOAD_REFUSED = 0.25
"""How much more than the bound a step is taken to need, as a part of it, where the
compiler refuses it without saying how much it does."""
