"""Each extra alone: what a module of ours needs is what its extra names, not what happens to be installed beside it."""

import json
import subprocess
import sys

import pytest

FORKED = """
import json, os, sys, traceback
from importlib.machinery import PathFinder
import torch

failed, hidden = [], set()

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
for module, names in json.loads(sys.argv[1]).items():
    if not (pid := os.fork()):
        hidden.update(names)
        try:
            __import__(module)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        failed.append(module)
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
"""
"""Import each, with some modules hidden, in a process forked from one that has imported torch; name what fails."""
NEEDED = {
    "fastckpt": set[str](),
    "fastckpt.accelerate": {"accelerate", "safetensors"},
    "fastckpt.deepspeed": {"deepspeed"},
    "fastckpt.huggingface": {"transformers", "accelerate", "safetensors"},
    "fastckpt.lightning": {"lightning", "transformers", "safetensors"},  # torchmetrics imports what pip has installed
    "fastckpt_run.watch.watcher": set[str](),  # --fast-tensorboard alone needs it, and says so
    "torch.utils.tensorboard": {"tensorboard"},
}
"""What an extra brings: by the names of modules, what it needs itself included."""
ALL = set[str]().union({"peft", "pynvml", "s3fs", "torchdata"}, *NEEDED.values())


@pytest.mark.frameworks
def test_a_module_needs_its_extra_alone():
    hidden = {module: sorted(ALL - needed) for module, needed in NEEDED.items()}
    command = [sys.executable, "-c", FORKED, json.dumps(hidden)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
