"""Where a state lives: on the devices of a mesh, and on disk.

In: pytrees of arrays, whole or stored. Out: arrays placed in their stored shardings,
whole arrays again, checkpoints (`checkpoint`) and exported weights (`safetensors`).
Imports `_core`.
"""
