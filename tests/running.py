"""Running the scripts as a user does: in another process."""

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "scripts"
TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n" * 20


def run(script, *args, **kwargs):
    command = [sys.executable, SCRIPTS / script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, **kwargs)
