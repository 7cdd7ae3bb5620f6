"""Draws one failure from the event log of a real job: a worker is killed, the others restart with it from memory.

    python -m docs_site.pictures.failure             # draw docs/images/failure.svg from the recorded log
    python -m docs_site.pictures.failure --record    # run the job (two workers, ten seconds), record its log, draw it

The job is failure_train.py. Names of the host and of directories are replaced in the record.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.drawing import Drawing, word

ROOT = Path(__file__).parents[2]
LOG, PICTURE = ROOT / "docs/images/failure.jsonl", ROOT / "docs/images/failure.svg"
SHAPE = ("--width", "512", "--layers", "16")
LEFT, WIDTH, LANE, TOP = 96, 880, 38, 40
SHOWN = {
    "killed", "worker_died", "workers_stopped", "flush_started", "flush_done", "rendezvous", "workers_started",
    "worker_joined", "resumed", "first_step", "saved", "restarted",
}  # fmt: skip
Event = dict[str, Any]


def record() -> None:
    """Run the job, and keep what its log says of the failure."""
    with tempfile.TemporaryDirectory(prefix="fastckpt-failure-") as made:
        folder = Path(made)
        log, job = folder / "log.jsonl", Path(__file__).with_name("failure_train.py")
        command = [sys.executable, "-m", "fastckpt_run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        command += ["--fast-events", str(log), str(job), "--checkpoints", str(folder / "run"), "--record", str(log)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *SHAPE], cwd=folder, env=environment, check=True, timeout=120)
        lines = log.read_text().replace(str(folder), "/data").replace(json.dumps(socket.gethostname()), '"node1"')
    events = sorted((json.loads(line) for line in lines.splitlines()), key=lambda event: event["monotonic"])
    step = next(event["step"] for event in events if event["event"] == "killed")
    near = [event for event in events if event["event"] in SHOWN and step - 2 <= event.get("step", step) <= step]
    LOG.write_text("".join(json.dumps(event) + "\n" for event in near))


def load() -> list[Event]:
    return [json.loads(line) for line in LOG.read_text().splitlines()]


class Failure:
    """Instants of a failure, in milliseconds since the worker was killed, by what the log calls them."""

    def __init__(self, events: list[Event]) -> None:
        self.killed = next(event for event in events if event["event"] == "killed")
        begin = self.killed["monotonic"]
        self.events = [event | {"at": 1e3 * (event.get("at", event["monotonic"]) - begin)} for event in events]

    def all(self, name: str, **fields: object) -> list[Event]:
        found = [event for event in self.events if event["event"] == name]
        return [event for event in found if all(event[field] == value for field, value in fields.items())]

    def last(self, name: str, **fields: object) -> Event:
        """Return the last of these events of several ranks, of those after the kill."""
        return max((event for event in self.all(name, **fields) if event["at"] >= 0), key=lambda event: event["at"])


Moment = tuple[float, str, str, str]
"""Milliseconds since the kill, the lane, what happens, and the event that says so."""


def story(failure: Failure) -> list[Moment]:
    """Return the moments of a failure and of the resume, in order."""
    rank, step = failure.killed["rank"], failure.killed["step"]
    resumed = failure.last("resumed")
    assert resumed["step"] == step - 1 and resumed["tier"] == "memory"
    load = f"step {step - 1} is loaded from memory, in {1e3 * resumed['seconds']:.0f} ms"
    flushed = f"the {word('flush')} of step {step - 1}, in the background, is {word('durable')}"
    moments = [
        (0.0, f"rank {rank}", f"rank {rank} is killed in step {step} by SIGKILL", ""),
        (failure.last("worker_died")["at"], "agent", f"the {word('agent')} is notified", "worker_died"),
        (
            failure.last("workers_stopped")["at"],
            "agent",
            f"all {word('worker')}s are dead and reaped",
            "workers_stopped",
        ),
        (failure.last("flush_done", step=step - 1)["at"], "storage", flushed, "flush_done"),
        (
            failure.last("workers_started")["at"],
            "agent",
            f"forked from the {word('template')}, new ones run",
            "workers_started",
        ),
        (resumed["at"], "rank 0", load, "resumed"),
        (failure.last("first_step")["at"], "rank 0", f"step {step} is done, the first after the failure", "first_step"),
    ]
    return sorted(moments)


def draw(events: list[Event]) -> str:
    """The picture: a lane for each rank, the agent, memory and storage, and a numbered list of what happens when."""
    failure = Failure(events)
    rank, step = failure.killed["rank"], failure.killed["step"]
    begin = min(event["at"] for event in failure.all("saved", step=step - 2))
    chart = Chart(
        begin, failure.last("saved", step=step)["at"] + 60, f"Rank {rank} is killed in step {step}, and what follows"
    )
    stopped, started = failure.last("workers_stopped")["at"], failure.last("workers_started")["at"]
    for number in (0, 1):
        lane = f"rank {number}"
        done = [failure.all("saved", step=step - back, rank=number)[0]["at"] for back in (2, 1)]
        chart.bar(lane, begin, done[0], "work", f"step {step - 2}")
        chart.bar(lane, done[0], done[1], "work", f"step {step - 1}")
        chart.bar(lane, done[1], 0 if number == rank else stopped, "work", f"step {step}")
        loaded = failure.last("resumed", rank=number)
        loading = loaded["at"] - 1e3 * loaded["seconds"]
        chart.bar(lane, started, loading, "pause", "set-up")
        chart.bar(lane, loading, loaded["at"], "memory", "load")
        chart.bar(lane, loaded["at"], failure.last("saved", step=step, rank=number)["at"], "work", f"step {step}")
    chart.bar("agent", failure.last("worker_died")["at"], stopped, "pause", "stop")
    chart.bar("agent", stopped, started, "pause", "start workers")
    held = max(event["at"] for event in failure.all("saved", step=step - 1))
    chart.bar("memory", begin, held, "memory", f"step {step - 2}")
    chart.bar(
        "memory",
        held,
        chart.end,
        "memory",
        f"step {step - 1} is kept by the {word('saver')}, whatever happens to workers",
    )
    flushing, flushed = (failure.last(name, step=step - 1)["at"] for name in ("flush_started", "flush_done"))
    chart.bar("storage", flushing, flushed, "pause", word("flush"))
    chart.bar("storage", flushed, chart.end, "storage", f"step {step - 1} is {word('durable')}")
    chart.cross(f"rank {rank}", 0)
    for number, moment in enumerate(story(failure), 1):
        chart.tell(number, moment)
    return chart.drawing.svg()


class Chart:
    """Lanes over time, and below them a list of moments, whose numbers are in the lanes."""

    LANES = ("rank 0", "rank 1", "agent", "memory", "storage")

    def __init__(self, begin: float, end: float, title: str) -> None:
        self.begin, self.end = begin, end
        self._scale = (WIDTH - LEFT - 16) / (end - begin)
        self._top = {lane: TOP + LANE * place for place, lane in enumerate(self.LANES)}
        self._list = TOP + LANE * len(self.LANES) + 24
        self.drawing = Drawing(WIDTH, self._list + 164, title)
        for lane, top in self._top.items():
            self.drawing.text(LEFT - 10, top + 17, lane, "strong end")

    def _x(self, at: float) -> float:
        return LEFT + (at - self.begin) * self._scale

    def bar(self, lane: str, begin: float, end: float, kind: str, text: str) -> None:
        """A bar with a text, if that has room."""
        x, width = self._x(begin) + 0.5, (end - begin) * self._scale - 1
        self.drawing.box(x, self._top[lane], width, LANE - 12, kind)
        if width > 8 * len(text):
            self.drawing.text(x + width / 2, self._top[lane] + 17, text, "middle")

    def cross(self, lane: str, at: float) -> None:
        x, y = self._x(at), self._top[lane] + (LANE - 12) / 2
        for slope in (-7, 7):
            self.drawing.line([(x - 7, y - slope), (x + 7, y + slope)], "lost")

    def tell(self, number: int, moment: Moment) -> None:
        """The number in its lane, and its line in the list."""
        at, lane, text, event = moment
        low = self._list + 23 * (number - 1)
        self.drawing.mark(self._x(at), self._top[lane] - 3, number)
        self.drawing.mark(LEFT, low - 4.5, number)
        self.drawing.text(LEFT + 76, low, f"{at:.0f} ms", "end strong")
        self.drawing.text(LEFT + 90, low, text)
        self.drawing.text(WIDTH - 16, low, event, "small end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the job, instead of reading the recorded log")
    if parser.parse_args().record:
        record()
    PICTURE.write_text(draw(load()))
    print(f"written to {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
