"""Setup of a loader worker: a data set's view of it, and its end with its rank."""

import dataclasses
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.data import _utils, get_worker_info

from fastckpt._core.memory.processes import Process
from fastckpt.errors import ConfigError


class WorkerSetup:
    """Runs first in each loader worker: makes ``get_worker_info()`` return the same as with a plain DataLoader.

    Args:
        init: The user's ``worker_init_fn``.
        hide: Whether a data set that asks which worker it is in gets an error.
    """

    def __init__(self, init: Callable[[int], None] | None, *, hide: bool) -> None:
        self._init = init
        self._hide = hide
        self._owner = Process.of(os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker that is not forked."""
        return vars(self) | {"_owner": Process.of(os.getpid())}

    def __call__(self, worker: int) -> None:
        """Set up that worker."""
        info = get_worker_info()
        if info is None:
            return
        # A thread that sleeps in poll() costs nothing; a signal at the parent's death would not do, see `_end_with`.
        threading.Thread(target=_end_with, args=(self._owner,), name="end with the rank", daemon=True).start()
        reader: Any = info.dataset
        info = dataclasses.replace(info, dataset=reader.dataset)
        reader.worker = info.id
        # A private name of torch: get_worker_info() reads this global, and gives the data set no other way to be set.
        _utils.worker._worker_info = info
        if self._init is not None:
            self._init(worker)
        if self._hide:
            _utils.worker._worker_info = _OneStream(info.seed, info.dataset)  # type: ignore[assignment]


def _end_with(owner: Process) -> None:
    """Die when this worker's rank dies: a worker that a fork server made has another parent, and would stay.

    Nor does the kernel report it in another way. Its signal at the parent's death comes when the *thread* ends that
    made the worker, which may be one that fetches ahead.
    """
    try:
        handle = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # no such call here
        return
    # Checked after the pidfd is open: before that the pid may have become another process's.
    if owner.is_alive():
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class _OneStream:
    """Stream of a data set that is to give the same samples in every worker: it must not depend on the worker."""

    def __init__(self, seed: int, dataset: Any) -> None:
        self.seed = seed
        self.dataset = dataset

    @property
    def id(self) -> NoReturn:
        """Asked by who shards."""
        raise _shards_itself("id")

    @property
    def num_workers(self) -> NoReturn:
        """Asked by who shards."""
        raise _shards_itself("num_workers")


def _shards_itself(name: str) -> ConfigError:
    return ConfigError(
        f"the data set asks for get_worker_info().{name}, so it seems to choose samples for each worker; the loader "
        "does that, too, and samples would be lost. Have it give all samples, or pass sharded=True"
    )
