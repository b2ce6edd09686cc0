"""`python -m shardfn`, or `shardfn`: see `shardfn._api.cli`; needs the extra `cli`."""

import sys

try:
    from shardfn._api.cli import main
except ModuleNotFoundError as error:
    if error.name not in ("rich", "tyro"):
        raise
    sys.exit(
        f"error: the command line needs the package {error.name}, which is not "
        "installed.\n"
        "Run pip install 'shardfn[cli]', or in a clone pip install -e '.[cli]'"
    )

if __name__ == "__main__":
    main()
