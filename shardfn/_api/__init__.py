"""What users call: `fully_shard`, the steps it makes, and the command line.

In: a training step, a mesh and options. Out: a callable like the step, which puts the
four stages, storage and analysis together. Imports every package but `testing`.
"""
