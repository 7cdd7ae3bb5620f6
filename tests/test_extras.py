"""Each extra alone: what a module of ours needs is what its extra names, not what happens to be installed beside it."""

import pytest

from tests.support.forked_imports import run_imports

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
    done = run_imports({module: ((), sorted(ALL - needed)) for module, needed in NEEDED.items()})
    assert done.returncode == 0, done.stderr
