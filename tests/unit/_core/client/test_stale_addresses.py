"""Log lines of restarted workers of torchrun that find addresses of dead ranks in its store."""

import logging
import sys
import time

import pytest

from fastckpt._core.client import job_store

DEADLINE = 60.0
PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_worker_that_finds_addresses_of_dead_ranks_logs_cause_and_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While its group forms, which takes long, and when it fails to; what threads of other tests log is not its."""

    def logged() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.module == "job_store"]

    def init_process_group() -> None:
        end = time.monotonic() + DEADLINE
        while not logged() and time.monotonic() < end:
            time.sleep(0.01)
        raise RuntimeError("Gloo connectFullMesh failed")

    launched = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setattr(job_store, "copy_of_environment", lambda: PLACE | launched)
    monkeypatch.setattr(job_store, "FORMING_PATIENCE", 0.1)
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    job_store.explain_stale_addresses()
    try:
        init_process_group()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    waits, fails = logged()
    assert waits.startswith("the process group is still being formed") and fails.startswith("gloo could not connect")
    assert all("(restart 1)" in each and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in each for each in (waits, fails))
