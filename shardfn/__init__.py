"""shardfn: fully sharded training steps in JAX, from an unedited step."""
