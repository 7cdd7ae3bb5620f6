"""Costs as things grow: state, tensors, ranks, checkpoints that are kept, files beside them, the log of events."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.turn import Record, Turn, values_of
from benchmarks.suite.growth import _growth_jobs as jobs
from benchmarks.suite.growth._growth_points import AXES, Axis, quantity
from benchmarks.suite.growth._growth_table import LIMITS, tabled
from benchmarks.suite.growth._power_law import fitted

SLOTS_AND_MORE = 4.6
"""Times the state's size: it, three slots, and what the job needs besides."""


def points(axis: Axis, turn: Turn) -> list[float]:
    """The points of an axis that fit into the memory of this machine."""
    chosen = axis.quick if turn.is_quick else axis.points
    if axis.name != "state":
        return [*chosen]
    room = psutil.virtual_memory().available / 1e9 / SLOTS_AND_MORE
    return [each for each in chosen if each <= min(room, turn.gigabytes)]


def grown(axis: Axis, turn: Turn) -> Values:
    """All costs at all points, in one turn, and the exponents with which they grow."""
    found: dict[str, list[float]] = {}
    for point in points(axis, turn):
        own = Turn(turn.gigabytes, turn.is_quick, turn.folder / f"at-{point:g}", turn.shm / f"at-{point:g}")
        for folder in (own.folder, own.shm):
            folder.mkdir()
        measured = measure(axis, point, own)
        found |= {quantity(cost, point): measured[cost] for cost in axis.costs if measured.get(cost)}
        _remove(own)
    return found | {"largest exponent": [max(exponents(axis, found))]}


def exponents(axis: Axis, found: Mapping[str, Sequence[float]]) -> list[float]:
    """The exponents of the costs that are no limits: 0 of a flat one."""
    laws = [0.0]
    for cost in set(axis.costs) - LIMITS:
        names = {x: quantity(cost, x) for x in axis.points}
        at = [(x, statistics.median(found[name])) for x, name in names.items() if name in found]
        laws += [fitted(at).exponent] if len(at) > 1 else []
    return laws


def _remove(turn: Turn) -> None:
    for folder in (turn.folder, turn.shm):
        subprocess.run(["rm", "-r", str(folder)], check=True)  # 100,000 files: faster than shutil


def measure(axis: Axis, point: float, turn: Turn) -> dict[str, list[float]]:
    """The costs at one point."""
    if axis.name in ("state", "tensors", "ranks"):
        return _of_a_life(axis.name, point, turn)
    if axis.name == "events":
        return _of_a_log(int(point), turn)
    kept = int(point) if axis.name == "checkpoints" else 3
    directory = turn.folder / "checkpoints"
    publish(turn, directory, kept)
    if axis.name == "files":
        for number in range(int(point)):
            (directory / f"events.out.{number:06d}").touch()
    listing = _command("ls", directory, turn)
    records = turn.job(jobs.visit, str(directory), kept, time.time())
    return _values(records) | {"fastckpt ls": listing}


def _of_a_life(name: str, point: float, turn: Turn) -> dict[str, list[float]]:
    """A launch that dies once, and one that finds no memory."""
    workers = int(point) if name == "ranks" else 1
    size = min(0.3, turn.gigabytes) if name == "ranks" else point
    records: list[Record] = []
    for launch in ("first", "second"):
        (shm := turn.shm / launch).mkdir()
        options = ["--max-restarts=1", "--fast-shm-dir", str(shm)]
        records += turn.job(jobs.live, name, size, time.time(), options=options, workers=workers)
        subprocess.run(["rm", "-r", str(shm)], check=True)
    return _values(records)


def _values(records: Sequence[Record]) -> dict[str, list[float]]:
    costs = {cost for axis in AXES for cost in axis.costs} - {"persist"}
    found = {cost: values_of(records, cost) for cost in costs}
    persisted = [each["seconds"] for each in records if each.get("event") == "persisted"]
    return found | {"persist": values_of(records, "persist") or persisted}


def publish(turn: Turn, directory: Path, count: int) -> None:
    """Have so many checkpoints in a directory: one that a job saved, and others like it."""
    from fastckpt._core.format.ids import SaveId
    from fastckpt._core.storage.image_source import PublishRequest
    from fastckpt._core.storage.local.directory import CheckpointDirectory

    turn.job(jobs.seed, str(directory))
    store = CheckpointDirectory(directory)
    (first,) = store.checkpoints()
    manifest = first.manifest
    more = {"world_size": manifest.world_size, "details": manifest.details}
    for step in range(2, count + 1):
        store.publish(PublishRequest(SaveId(first.id.history, step), first.files(), **more))


def _of_a_log(lines: int, turn: Turn) -> dict[str, list[float]]:
    """A launch that goes on with a log of earlier ones, and the report on it."""
    directory, log = turn.folder / "checkpoints", turn.folder / "log"
    events = [each for each in turn.job(jobs.seed, str(directory)) if "event" in each]
    first, last = events[0]["monotonic"], events[-1]["monotonic"]
    with log.open("w") as file:
        for number in range(lines):
            launch, event = divmod(number, len(events))
            # Earlier than the launch to come: its clock goes on from that of the last one.
            shift = (launch - lines / len(events)) * (last - first)
            file.write(f"{json.dumps(_shifted(events[event], shift, first))}\n")
    recorded = turn.job(jobs.visit, str(directory), 3, time.time(), environment={"FASTCKPT_EVENTS": str(log)})
    return _values(recorded) | {"fastckpt report": _command("report", log, turn)}


def _shifted(value: Any, shift: float, first: float) -> Any:
    """An event with all its times moved: by the clocks of the host and of people, which are beyond ``first``."""
    if isinstance(value, dict):
        return {key: _shifted(each, shift, first) for key, each in value.items()}
    if isinstance(value, list):
        return [_shifted(each, shift, first) for each in value]
    return value + shift if isinstance(value, float) and value >= first else value


def _command(name: str, argument: Path, turn: Turn) -> list[float]:
    """Seconds of two runs of a command."""
    code = "from fastckpt_run.commands import tools; tools()"
    environment = os.environ | {"FASTCKPT_SHM_DIR": str(turn.shm)}
    took = []
    for _ in range(2):
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", code, name, str(argument)], env=environment, stdout=subprocess.DEVNULL, check=True
        )
        took.append(time.perf_counter() - begun)
    return took


BENCHMARK = Benchmark(
    name="growth",
    question="How do costs grow with state, tensors, ranks, checkpoints, other files, and the event log?",
    work="Real launches: saves, persists, a resume from memory and one from storage, and commands. The exponent is "
    "that of the cost beyond a constant. The goal is at most 1.2 on each axis. Flat: less than half more over the "
    "whole axis.",
    contenders=[Contender(axis.name, partial(grown, axis), quick=bool(axis.quick)) for axis in AXES],
    figures=[
        Figure(f"{axis.title}: largest exponent", f"{axis.name}.largest exponent", goal=Goal("at most", 1.2), unit="")
        for axis in AXES
    ],
    rounds=1,
    gigabytes=4,
    table=tabled,
)
