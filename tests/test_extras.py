"""Each extra alone: what a module of ours needs is what its extra names, not what happens to be installed beside it."""

import subprocess
import sys

import pytest

HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in sys.argv[2:] else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
__import__(sys.argv[1])
"""
NEEDED = {
    "fastckpt": set[str](),
    "fastckpt.accelerate": {"accelerate", "safetensors"},
    "fastckpt.deepspeed": {"deepspeed"},
    "fastckpt.huggingface": {"transformers", "accelerate", "safetensors"},
    "fastckpt.lightning": {"lightning", "transformers", "safetensors"},  # torchmetrics imports what pip has installed
    "fastckpt._core.inspect.export": {"safetensors"},
    "fastckpt_run.watch.watcher": set[str](),  # --fast-tensorboard alone needs it, and says so
    "torch.utils.tensorboard": {"tensorboard"},
}
"""What an extra brings: by the names of modules, what it needs itself included."""
ALL = set[str]().union({"peft", "pynvml", "s3fs", "torchdata"}, *NEEDED.values())


@pytest.mark.frameworks
@pytest.mark.parametrize("module", NEEDED)
def test_a_module_needs_its_extra_alone(module: str):
    hidden = sorted(ALL - NEEDED[module])
    done = subprocess.run([sys.executable, "-c", HIDE, module, *hidden], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
