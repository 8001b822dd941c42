"""Packages that not everyone needs: an extra of setup.cfg brings each, and it is imported where it is used."""

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """Return a module; ImportError names the package and the extra that brings it, if it isn't installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f'this needs the package {package}: pip install -e ".[{extra}]"') from error
