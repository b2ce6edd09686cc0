"""Runs a training step that nobody here wrote, unedited, and prints a row about it.

python examples/in_the_wild/run.py NAME --source PATH     # of a checkout
"""

import argparse
import sys
from pathlib import Path

import jax

if __name__ == "__main__":  # before the first computation
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

from program import run
from programs import PROGRAMS
from sources import SourceError


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PROGRAMS)
    parser.add_argument("--source", type=Path, required=True)
    given = parser.parse_args(argv)
    try:
        print(run(given.name, PROGRAMS[given.name], given.source.absolute()))
    except SourceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
