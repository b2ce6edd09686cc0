"""Finds the options with which a step is fastest, and reads them from a file.

In: a step and a target. Out: a `Tuning`, and the file that `fully_shard(options=path)`
reads.
"""
