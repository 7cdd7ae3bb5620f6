"""Batches that continue: after a resume each sample of an epoch is used once, on any number of ranks and workers.

The contract of an object that a checkpointer takes as ``data=``:

- ``state_dict()`` is what all ranks have in common: equal on all of them, saved once with the model. It counts what was
  handed out, so a checkpointer calls it at the end of a step.
- ``rank_state_dict()``, if there is one, is what a rank has beside it: saved by each rank, and empty for most data.
- ``load_state_dict(common)`` comes first, then ``load_rank_state_dict(own)``. Both raise ConfigError, before anything
  is handed out, if they do not fit.
- An object without ``rank_state_dict``, such as torchdata's StatefulDataLoader, has a ``state_dict()`` of its own on
  each rank. It can go on with the same number of ranks and loader workers, data set and batch size only.

`ResumableDataLoader` and `ResumableSampler` are such objects. `data_state` and `load_data_state` serve either kind.
"""

from fastckpt._core.data.protocol import DataState, data_state, load_data_state
from fastckpt.data.loader import ResumableDataLoader
from fastckpt.data.sampler import ResumableSampler

__all__ = ["DataState", "ResumableDataLoader", "ResumableSampler", "data_state", "load_data_state"]
