"""Checkpointers in this process: alone, or as the ranks of a job with a saver of their own."""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastckpt._core.config import AGENT_VARIABLE, Settings
from fastckpt._core.memory import slots
from fastckpt._core.saver.server import Saver
from fastckpt._core.storage.local.directory import CheckpointDirectory
from fastckpt.ddp import DdpCheckpointer
from fastckpt.errors import FastckptError, NoLoadableCheckpoint
from tests.faults.conftest import new_job  # noqa: F401 (a fixture)
from tests.support import launchers
from tests.support.waits import until as until
from tests.unit._core.memory.conftest import small_disk, small_tmpfs  # noqa: F401 (fixtures)


class Rounds:
    """An agreement of ranks that are threads of one process."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(max(1, world))  # none takes part in the rounds of a launch without workers
        self._said: dict[int, Any] = {}
        self._rank = threading.local()
        self._answer: list[Any] = []

    def as_rank(self, rank: int) -> "Rounds":
        self._rank.number = rank
        return self

    def gather(self, value: Any) -> list[Any]:
        self._said[getattr(self._rank, "number", 0)] = json.loads(json.dumps(value))
        self._barrier.wait(60)
        said = [self._said[rank] for rank in sorted(self._said)]
        self._barrier.wait(60)
        return said

    def decide(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        said, answer = self.gather(value), [None, None]
        if getattr(self._rank, "number", 0) == 0:
            try:
                answer[0] = decide(said)
            except FastckptError as error:
                answer[1] = error
            self._answer = answer
        self._barrier.wait(60)
        answer = self._answer
        self._barrier.wait(60)
        if answer[1] is not None:
            raise type(answer[1])(str(answer[1]))
        return json.loads(json.dumps(answer[0]))

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """As if what one rank raises, all did by themselves."""
        yield
        self.gather(None)


class Ranks:
    """The ranks of one node: a saver as the agent runs one, and checkpointers that find it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self._monkeypatch = monkeypatch
        self.saver: Saver | None = None
        self.members: list[DdpCheckpointer] = []

    def start(self, world: int = 1, **options: Any) -> list[DdpCheckpointer]:
        """A launch: a new saver, and a checkpointer for each rank."""
        self.saver = Saver(Settings.from_environment())
        self.saver.start()
        self._monkeypatch.setenv(AGENT_VARIABLE, self.saver.address)
        return self.start_workers(world, **options)

    def start_workers(self, world: int = 1, **options: Any) -> list[DdpCheckpointer]:
        rounds = Rounds(world)
        self._world = world
        self._monkeypatch.setattr("fastckpt._core.session.agreement", lambda world_size: rounds)
        self.members = [self.join(rank, world, **options) for rank in range(world)]
        self._rounds = rounds
        return self.members

    def join(self, rank: int, world: int, **options: Any) -> DdpCheckpointer:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            self._monkeypatch.setenv(name, str(value))
        return DdpCheckpointer(self.directory, **options)

    def together(self, act: Callable[[DdpCheckpointer, int], Any]) -> list[Any]:
        """What each rank's act returns; all act at the same time."""

        def of_rank(rank: int) -> Any:
            self._rounds.as_rank(rank)
            return act(self.members[rank], rank)

        with ThreadPoolExecutor(len(self.members)) as pool:
            return [future.result(120) for future in [pool.submit(of_rank, rank) for rank in range(len(self.members))]]

    def load(self, resume_path: Any = "") -> list[dict[str, Any]]:
        return self.together(lambda member, _: member.load_checkpoint(resume_path))

    def resume(self, resume_path: Any = "") -> list[tuple[int, str]]:
        """Step and tier of each rank."""
        loaded = [found["step"] for found in self.load(resume_path)]
        assert [member.loaded_step for member in self.members] == loaded
        return [(member.loaded_step, member.loaded_from) for member in self.members]

    def refusals(self, kind: type[Exception] = NoLoadableCheckpoint, resume_path: Any = "") -> list[str]:
        """What each rank is told that cannot load."""

        def refused(member: DdpCheckpointer, rank: int) -> str:
            with pytest.raises(kind) as info:
                member.load_checkpoint(resume_path)
            return str(info.value)

        return self.together(refused)

    def slot_of(self, step: int, rank: int = 0) -> Path:
        """Where the node of a rank has a step in memory."""
        found = self.members[rank]._writer.link.arena.glob("slot-*")
        return next(slot for slot in found if (save := slots.read(slot).committed) and save.step == step)

    def workers_die(self) -> None:
        """As far as the saver can tell: they hang up, and the agent says that they are reaped."""
        for member in self.members:
            member._writer.close()  # which lends nothing
        self.members = []
        assert self.saver is not None
        self.saver.breakpoint()

    def end(self) -> None:
        """The good end of a job."""
        for member in self.members:
            member.close()
        self.members = []
        if self.saver is not None:
            self.saver.close()
        self.saver = None


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def ranks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks(directory, monkeypatch)
    yield made
    made.end()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What fastckpt logs, also when the launcher's tests gave its logger a handler of its own."""
    monkeypatch.setattr(logging.getLogger("fastckpt"), "propagate", True)
    caplog.set_level(logging.INFO, "fastckpt")
    return caplog


def on_storage(directory: Path) -> list[int]:
    return sorted(stored.id.step for stored in CheckpointDirectory(directory).checkpoints())


def flip(path: Path, offset: int | None = None) -> None:
    """Damage one byte; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if offset is None else offset] ^= 0x10
    path.write_bytes(data)


def run_script(text: str, folder: Path, *arguments: str, expected: int = 0, **variables: str) -> str:
    """Run a program in a process of its own, which is a fork if there are ``forked_launchers``; what it writes."""
    (program := folder / "program.py").write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    with (folder / "output").open("wb") as output:
        code = launchers.start([str(program), *arguments], environment, output.fileno()).wait(120)
    said = (folder / "output").read_text()
    assert code == expected, said
    return said


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"weights": torch.full((size,), float(value)), "step": int(value), "names": ["a", "b"]}
