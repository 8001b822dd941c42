"""Whether the machine is ours alone: who shares its cores can slow a step tenfold."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")  # Linux's


def warnings_of_load(seconds: float = 0.5) -> list[str]:
    """Return the load average, and a warning if others are at work while this process sleeps."""
    lines = [f"load average of the last minute: {os.getloadavg()[0]:.2f}"] if hasattr(os, "getloadavg") else []
    if STAT.exists():
        before = busy_seconds()
        time.sleep(seconds)
        busy = (busy_seconds() - before) / seconds
        if busy > 0.1:
            lines.append(
                f"warning: other processes use {busy:.1f} of the cores to be measured on; expect wrong figures"
            )
    return lines


def busy_seconds() -> float:
    """Return how long the cores that this process may use have worked, all together, since the start."""
    mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    total = 0
    for line in STAT.read_text(encoding="ascii").splitlines():
        name, *ticks = line.split()
        if name in mine:
            user, nice, system = map(int, ticks[:3])
            total += user + nice + system
    return total / os.sysconf("SC_CLK_TCK")
