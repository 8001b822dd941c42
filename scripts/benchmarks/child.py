"""A process of one's own: runs the function named by a job and prints what it returns as a line of JSON.

python -m benchmarks.child '{"function": "timing.measure_training", "threads": 2, "arguments": {...}}'
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Read the job, keep to so many cores, and do it."""
    job = json.loads(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # JAX knows no other limit
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
    module, _, function = job["function"].partition(".")
    result = getattr(importlib.import_module(f"benchmarks.{module}"), function)(**job["arguments"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
