"""What TensorStore leaves behind when it makes Python objects of JSON: host memory per
call, and how often a result is referred to by nobody that there is.

    python benchmarks/tensorstore_leak.py
"""

import gc
import importlib.metadata
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import tensorstore as ts

CALLS = 20_000


def left_behind(call: Callable[[], Any], count: int = CALLS) -> float:
    """Bytes of host memory per call."""
    for _ in range(count // 20):
        call()
    before = resident()
    for _ in range(count):
        call()
    gc.collect()
    return (resident() - before) / count


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    version = importlib.metadata.version("tensorstore")
    print(f"TensorStore {version}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        files = {"driver": "file", "path": f"{folder}/"}
        metadata = {"shape": [8, 8], "chunks": [8, 8], "dtype": "<f4"}
        spec = ts.Spec({"driver": "zarr", "kvstore": files, "metadata": metadata})
        array = ts.open(spec, create=True).result()
        array[...] = 1.0
        store = ts.KvStore.Spec(files)
        made = spec.to_json()["metadata"]
        # `made` and the argument of the call are all that should refer to it.
        print(f"references to a new result: {sys.getrefcount(made)}, should be 2")
        metrics = ts.experimental_collect_matching_metrics
        for name, call, count in (
            ("Spec.to_json()", spec.to_json, CALLS),
            ("KvStore.Spec.to_json()", store.to_json, CALLS),
            (
                "metrics of a store",
                lambda: metrics("/tensorstore/kvstore/"),
                CALLS // 20,
            ),
            ("opening an array", lambda: ts.open(spec).result(), CALLS // 20),
        ):
            print(f"{name}: {left_behind(call, count):,.0f} bytes per call", flush=True)


if __name__ == "__main__":
    main()
