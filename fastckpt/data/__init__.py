"""Batches that continue: after a resume each sample of an epoch is used once.

An object for ``data=`` of a checkpointer has these methods:

- ``state_dict()``: state that all ranks share, saved once. It is called at the end of a step.
- ``rank_state_dict()``, optional: state of each rank, empty for most data.
- ``load_state_dict(common)``, then ``load_rank_state_dict(own)``. They raise ConfigError if the state does not fit.

An object without ``rank_state_dict``, such as torchdata's StatefulDataLoader, has a ``state_dict()`` per rank. It needs
the same number of ranks and workers, data set and batch size.
"""

from fastckpt._core.data.protocol import DataState, data_state, load_data_state
from fastckpt.data.loader import ResumableDataLoader
from fastckpt.data.sampler import ResumableSampler

__all__ = ["DataState", "ResumableDataLoader", "ResumableSampler", "data_state", "load_data_state"]
