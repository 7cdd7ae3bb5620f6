"""A place for activations, and threads of the offloading that wait in a phase until a test lets them go on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fastckpt._core import metrics
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import settled as settle  # noqa: F401
from tests.support.offload_budget import budget_is_kept  # noqa: F401 (a fixture)

DEADLINE = 60.0


class Gate:
    """Holds threads that enter a phase."""

    def __init__(self, phase: str) -> None:
        self.entered = 0
        self._phase = phase
        self._changed, self._open = threading.Condition(), threading.Event()

    def observe(self, phase: str, fields: dict[str, object]) -> None:
        if phase != self._phase:
            return
        with self._changed:
            self.entered += 1
            self._changed.notify_all()
        assert self._open.wait(DEADLINE)

    def wait_for(self, count: int) -> None:
        """Wait until that many threads have entered."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.entered >= count, DEADLINE), f"{self.entered} of {count}"

    def open(self) -> None:
        self._open.set()


@contextmanager
def held(phase: str) -> Iterator[Gate]:
    gate = Gate(phase)
    metrics.observe(gate.observe)
    try:
        yield gate
    finally:
        gate.open()
        metrics.unobserve(gate.observe)


@pytest.fixture
def offload(tmp_path):
    return ActivationOffload(tmp_path, budget="64MiB")


def store_of(offload: ActivationOffload):
    return offload._offloader._store
