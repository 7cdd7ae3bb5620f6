"""Imports of modules in processes of their own, which are forked from one that has imported torch alone."""

import json
import subprocess
import sys
from collections.abc import Collection, Mapping

_PROGRAM = """
import json, os, sys, traceback
from importlib.machinery import PathFinder
import torch

failed, hidden = [], set()

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
for module, (names, without) in json.loads(sys.argv[1]).items():
    if not (pid := os.fork()):
        hidden.update(without)
        try:
            exec(f"from {module} import {', '.join(names)}" if names else f"import {module}")
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        failed.append(module)
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
"""


def run_imports(imports: Mapping[str, tuple[Collection[str], Collection[str]]]) -> "subprocess.CompletedProcess[str]":
    """Import each module, or names of it, where some top modules cannot be found; stderr ends with those that failed.

    Args:
        imports: The names to import from each module, and the modules that are hidden from it.
    """
    command = [sys.executable, "-c", _PROGRAM, json.dumps({m: [*map(list, each)] for m, each in imports.items()})]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
