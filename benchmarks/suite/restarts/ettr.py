"""The part of its time that a job makes use of while it is killed again and again."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.benchmark import Benchmark, Contender, Figure, Goal, Values
from benchmarks.harness.drawing import Drawing
from benchmarks.harness.results import Run
from benchmarks.harness.turn import ROOT, Turn

SCRIPT = Path(__file__).with_name("_ettr_train.py")
MEANS = (60, 20, 10)
"""Mean seconds between kills; a job for each, at the same time."""
EVERY = (2, 5)
"""Steps between calls of torch.save: about the optimum by Young for these means; 1, 10, 20 and 50 were worse at all."""
SECONDS, QUICK = 60.0, 10.0
STEP = 0.5
PATIENCE = 120.0
"""Seconds for a job to start, or to come back after the last kill."""
DRAWN = 20
"""The mean of the picture."""


def instants(mean: float, seconds: float, number: int) -> list[float]:
    """Return the instants of the kills in a round: as many as the mean has in that time, at independent instants.

    So are those of kills whose distances are exponentially distributed, if that number of them is given.
    """
    rng = random.Random(f"{mean} {number}")
    return sorted(rng.uniform(0.0, seconds) for _ in range(max(1, round(seconds / mean))))


@dataclass(frozen=True)
class Life:
    """One start of a job's worker: when it had resumed, after which step, and when it had done each further one."""

    resumed: float
    step: int
    done: list[float]
    killed: float | None

    @property
    def last(self) -> float:
        """The end of its last step."""
        return self.done[-1] if self.done else self.resumed


class Job:
    """A job in a folder of its own, which is killed and watched through what its worker writes."""

    def __init__(self, folder: Path, shm: Path, every: int, megabytes: float) -> None:
        self._folder, self._shm, self._kills = folder, shm, list[float]()
        launcher = "torch.distributed.run" if every else "fastckpt_run"
        own = [
            str(SCRIPT),
            "--out",
            str(folder),
            f"--every={every}",
            f"--step-seconds={STEP}",
            f"--megabytes={megabytes}",
        ]
        self._command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=1", "--max-restarts=1000"]
        self._command += own

    @contextlib.contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        self._folder.mkdir()
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._folder), "FASTCKPT_SHM_DIR": str(self._shm)}
        with (self._folder / "output").open("wb") as output:
            environment = os.environ | own | {"PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(self._command, stdout=output, stderr=output, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)

    def run(self, kills: Sequence[float], seconds: float) -> list[Life]:
        """Kill the worker at these instants after its first resume; give all lives that began within the time."""
        with self._started() as process:
            begin = self._resumed(process, 1)
            assert begin is not None
            for instant in kills:
                time.sleep(max(0.0, begin + instant - time.monotonic()))
                self._kill(process)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            lives = self.lives()
            if lives[-1].killed is not None:  # what it resumes from was of use
                self._resumed(process, len(lives) + 1)
        return self.lives()

    def _stamps(self) -> list[dict[str, Any]]:
        path = self._folder / "stamps"
        text = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in text if line.endswith("\n")]

    def _resumed(self, process: subprocess.Popen[bytes], count: int) -> float | None:
        """Return the time of this resume; None if the launcher has given up before."""
        end = time.monotonic() + PATIENCE
        while len(found := [line["at"] for line in self._stamps() if line["what"] == "resumed"]) < count:
            if process.poll() is not None and count > 1:
                return None
            if process.poll() is not None or time.monotonic() > end:
                output = (self._folder / "output").read_text()
                raise RuntimeError(f"{' '.join(self._command)} has not resumed {count} times:\n{output[-3000:]}")
            time.sleep(0.05)
        return float(found[count - 1])

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the worker, if there is one."""
        begun = [line["pid"] for line in self._stamps() if line["what"] == "script"]
        with contextlib.suppress(psutil.NoSuchProcess):
            worker = psutil.Process(begun[-1])
            if worker.status() != psutil.STATUS_ZOMBIE and process.pid in (each.pid for each in worker.parents()):
                worker.kill()
                self._kills.append(time.monotonic())

    def lives(self) -> list[Life]:
        """All so far."""
        found: list[Life] = []
        for line in self._stamps():
            if line["what"] == "resumed":
                killed = next((kill for kill in self._kills if kill > line["at"]), None)
                found.append(Life(line["at"], line["step"], [], killed))
            elif line["what"] == "step":
                found[-1].done.append(line["at"])
        return found


def shares(lives: Sequence[Life], seconds: float) -> dict[str, float]:
    """Divide the time from the first resume on, and return the share that useful steps fill."""
    begin, within = lives[0].resumed, [life for life in lives if life.resumed < lives[0].resumed + seconds]
    *before, last = within
    done = [at for at in last.done if at < begin + seconds]
    # An unfinished step at the end is neither of use nor lost; a job that is down then has lost what it repeats later.
    down_at_end = last.killed is not None and last.killed < begin + seconds
    end = begin + seconds if down_at_end else (done or [last.resumed])[-1]
    has_next = len(lives) > len(within)
    useful = lives[len(within)].step if down_at_end and has_next else last.step + len(done)
    restarts, unfinished, repeated = 0.0, 0.0, 0.0
    for life, following in zip_longest(within if down_at_end else before, lives[1 : len(within) + down_at_end]):
        assert life.killed is not None
        restarts += (min(following.resumed, end) if following else end) - life.killed
        unfinished += life.killed - life.last
        repeated += (life.step + len(life.done) - following.step) * STEP if following else 0.0
    rest = end - begin - useful * STEP - restarts - unfinished - repeated
    lost = {"restart": restarts, "unfinished": unfinished, "repeated": repeated, "saves": rest}
    kills = max(1, len(before) + down_at_end)
    return {"ettr": useful * STEP / (end - begin), **{name: each / kills for name, each in lost.items()}}


def jobs(turn: Turn, every: int, means: Sequence[int]) -> dict[int, list[Life]]:
    """The lives of a job for each of these means, at the same time."""
    seconds = QUICK if turn.is_quick else SECONDS

    def one(mean: int) -> list[Life]:
        folder = turn.folder / f"{every}-{mean}-of-{len(means)}"
        return Job(folder, turn.shm, every, turn.gigabytes * 1e3).run(instants(mean, seconds, turn.number), seconds)

    with ThreadPoolExecutor(len(means)) as pool:
        return dict(zip(means, pool.map(one, means), strict=True))


def values_of(found: dict[int, list[Life]], seconds: float) -> dict[str, list[float]]:
    """Return the values for figures and picture."""
    values = {
        f"{name}_{mean}": [value] for mean, lives in found.items() for name, value in shares(lives, seconds).items()
    }
    if lives := found.get(DRAWN, []):
        begin = lives[0].resumed
        points = [(at - begin, life.step + n) for life in lives for n, at in enumerate([life.resumed, *life.done])]
        values |= {"drawn_at": [at for at, _ in points], "drawn_steps": [float(step) for _, step in points]}
        values["drawn_kills"] = [life.killed - begin for life in lives if life.killed is not None]
    return values


def fastckpt(turn: Turn) -> Values:
    """The three lines under fastckpt-run; once more alone, to see whether jobs at the same time disturb each other."""
    seconds = QUICK if turn.is_quick else SECONDS
    values = values_of(jobs(turn, 0, MEANS), seconds)
    if not turn.is_quick:
        values["alone"] = [shares(jobs(turn, 0, MEANS[-1:])[MEANS[-1]], seconds)["ettr"]]
    return values


def torch_save(turn: Turn) -> Values:
    """torchrun, and torch.save with a rename at several intervals; at each mean the best of the round counts."""
    seconds = QUICK if turn.is_quick else SECONDS
    tried = {every: values_of(jobs(turn, every, MEANS), seconds) for every in (EVERY[:1] if turn.is_quick else EVERY)}
    best = {mean: max(tried, key=lambda every, mean=mean: tried[every][f"ettr_{mean}"]) for mean in MEANS}
    found = {f"ettr_{mean}_every_{every}": each[f"ettr_{mean}"] for every, each in tried.items() for mean in MEANS}
    for mean, every in best.items():
        found |= {name: each for name, each in tried[every].items() if name.endswith(f"_{mean}")}
        found[f"best_{mean}"] = [float(every)]
    return found | {name: each for name, each in tried[best[DRAWN]].items() if name.startswith("drawn")}


WAYS = {"fastckpt": "fastckpt", "torch.save": "torchrun + torch.save"}
WIDTH, HEIGHT, LEFT, TOP = 760, 330, 60, 40


def picture(run: Run) -> Drawing:
    """Useful steps over time in the first round, with the kills."""
    drawing = Drawing(WIDTH, HEIGHT, f"Steps over time, kills every {DRAWN} s on average")
    end = QUICK if run.is_quick else SECONDS
    right, bottom = WIDTH - 170, HEIGHT - 50

    def place(at: float, steps: float) -> tuple[float, float]:
        return LEFT + at / end * (right - LEFT), bottom - steps * STEP / end * (bottom - TOP)

    drawing.text(
        LEFT, 24, f"Steps of {STEP:g} s, of those that fit into the time; killed every {DRAWN} s on average", "strong"
    )
    for part in (0.0, 0.5, 1.0):
        x, y = place(end * part, end * part / STEP)
        drawing.text(x, bottom + 18, f"{end * part:g} s", "small middle")
        drawing.text(LEFT - 8, y + 4, f"{part:.0%}", "small end")
        drawing.line([(LEFT, y), (right, y)], "line dashed")
    first = min(run.rounds("fastckpt.drawn_at"))
    for instant in instants(DRAWN, end, first):
        drawing.line([place(instant, 0.0), place(instant, end / STEP)], "lost")
    for kind, name in (("strong", "fastckpt"), ("", "torch.save")):
        at, steps = (run.rounds(f"{name}.drawn_{what}")[first] for what in ("at", "steps"))
        points = [place(x, y) for x, y in zip(at, steps, strict=True) if x <= end]
        drawing.line(points, f"line {'' if kind else 'dashed'}".strip())
        drawing.text(right + 8, points[-1][1] + 4, WAYS[name], f"small {kind}".strip())
    drawing.text(
        LEFT,
        HEIGHT - 12,
        "Red: a kill. A line falls where steps are lost, and is level while the job starts again.",
        "small",
    )
    return drawing


def figures() -> Iterator[Figure]:
    """Rows of the table."""
    for mean, goal in zip(MEANS, (0.97, 0.92, 0.80), strict=True):
        yield Figure(f"useful part, kills every {mean} s", f"fastckpt.ettr_{mean}", "", Goal("at least", goal), "of 1")
    for mean in MEANS:
        yield Figure(f"useful part with torch.save at its best, {mean} s", f"torch.save.ettr_{mean}", unit="of 1")
    for mean in MEANS:
        goal = Goal("at least", 1.6) if mean == DRAWN else None
        yield Figure(
            f"fastckpt : torch.save at its best, {mean} s", f"fastckpt.ettr_{mean}", f"torch.save.ettr_{mean}", goal
        )
        yield Figure(f"its best interval, {mean} s", f"torch.save.best_{mean}", unit="steps", is_detail=True)
    yield Figure(
        f"useful part, {MEANS[-1]} s, no other job at the same time", "fastckpt.alone", unit="of 1", is_detail=True
    )
    lost = {
        "restart": "until it has resumed",
        "unfinished": "the step that the kill interrupts",
        "repeated": "steps done again",
        "saves": "saves, and steps that take longer",
    }
    for name in ("fastckpt", "torch.save"):
        for key, what in lost.items():
            name_of_row = f"lost per kill, {MEANS[-1]} s: {what}; {name}"
            yield Figure(name_of_row, f"{name}.{key}_{MEANS[-1]}", is_detail=True)


BENCHMARK = Benchmark(
    name="ettr",
    question="What part of its time is useful for a job whose worker is killed again and again?",
    work="One worker runs steps of 0.5 s for 60 s, mostly sleep; SIGKILL comes at random instants, the same for all. "
    "Useful are the steps that no kill took back, from the first resume on. Intervals are automatic; torchrun "
    "with torch.save (no fsync) saves every second step or every fifth, whichever is better.",
    contenders=[Contender("fastckpt", fastckpt), Contender("torch.save", torch_save)],
    figures=list(figures()),
    rounds=2,
    gigabytes=0.024,
    picture=picture,
)
