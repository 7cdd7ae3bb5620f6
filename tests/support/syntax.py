"""Syntax trees of source files, each parsed once."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file; not to be changed.

    Nothing is collected meanwhile: Python 3.11 keeps the depth of a parse in one place for all threads, and a finalizer
    lets another thread in, so that a parse there made this one fail ("AST constructor recursion depth mismatch").
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        if enabled:
            gc.enable()
