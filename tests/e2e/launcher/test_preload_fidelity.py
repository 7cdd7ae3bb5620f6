"""Forks of the template see what they would see in a fresh process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastckpt_run.preload.preloader import ForkedWorker
from fastckpt_run.script_analysis import read
from tests.conftest import PATH
from tests.e2e.launcher.conftest import LIGHT, program
from tests.e2e.launcher.preloading import Run, Starter, template

PROBE = program("probe.py")


@pytest.fixture(params=[LIGHT])
def starter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", request.param)
    with template(PROBE) as preloader:
        yield Starter(tmp_path, preloader)


def seen(run: Run) -> dict[str, Any]:
    """What a run told, without what is its own."""
    code, out, err = run.wait()
    text = (run.folder / "probe").read_text() if (run.folder / "probe").exists() else "{}"
    told = {"code": code, "out": out, "err": err} | json.loads(text.replace(str(run.folder), "FOLDER"))
    told.pop("differs", None)
    return told


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            yield from differences(one.get(name), other.get(name), f"{where}.{name}")
    elif one != other:
        yield f"{where}: executed {one!r}, forked {other!r}"


def assert_alike(runs: tuple[Run, Run]) -> None:
    assert [type(run.handler.proc) for run in runs] == [subprocess.Popen, ForkedWorker]
    executed, forked = map(seen, runs)
    found = list(differences(executed, forked))
    assert not found, "\n".join(found)


def test_a_forked_worker_sees_the_interpreter_state_of_a_fresh_process(starter: Starter) -> None:
    assert_alike(starter.both(PROBE, "--lr", "1", "", "a b", "é", PROBE_METHODS="spawn fork forkserver"))


@pytest.mark.parametrize("starter", [PATH], indirect=True)
def test_a_forked_worker_sees_torch_as_a_fresh_process_does(starter: Starter, tmp_path: Path) -> None:
    """And what is random differs between all of them, as it does between fresh processes."""
    environment = {"PROBE_TORCH": "1"}
    runs = starter.both(PROBE, **environment)
    other = starter.start(starter.template, (PROBE,), environment)
    executed, forked = map(seen, runs)
    fresh, preloaded = (set(told["interpreter"].pop("modules")) for told in (executed, forked))
    late = [told.pop("late") for told in (executed, forked)]
    for told in (executed, forked):
        told["interpreter"].pop("filters")
    found = list(differences(executed, forked))
    assert not found, "\n".join(found)
    assert fresh <= preloaded, "a fork has what a fresh process has"
    assert late[0] == late[1], "and no more than the imports of the template"
    other.wait()
    drawn = [run.told()["differs"] for run in (*runs, other)]
    assert all(len(set(values)) == len(drawn) for values in zip(*drawn, strict=True)), drawn
    outcome = starter.template._template.outcome(0) if starter.template._template else None
    assert outcome is not None
    (tmp_path / "train.py").write_text("def f():\n  import os\n  os.environ['TORCH_COMPILE_DISABLE'] = '1'\nf()")
    why = "the script sets TORCH_COMPILE_DISABLE, which torch reads when it needs its compiler"
    assert read(["train.py"]).contradicts(outcome.read, outcome.late) == why


def test_a_forked_worker_sees_paths_and_specs_of_each_kind_of_script(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sys.path[0]``, ``__file__``, ``__spec__`` and the rest for each way to name a script."""
    package, folder, links = tmp_path / "package", tmp_path / "folder", tmp_path / "links"
    for path in (package, folder, links):
        path.mkdir()
    (package / "__init__.py").touch()
    for name in (package / "train.py", package / "__main__.py", folder / "__main__.py", tmp_path / "train.py"):
        shutil.copy(PROBE, name)
    (links / "link.py").symlink_to(tmp_path / "train.py")
    (links / "relative.py").symlink_to("../train.py")
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.write(PROBE, "__main__.py")
    named = ["./train.py", "links/../train.py", "links/link.py", "links/relative.py", "folder", "train.zip"]
    commands = [[name, "x"] for name in named]
    commands += [["-m", "package.train", "-m"], ["-m", "package"], ["-m", "train"]]
    pairs = [starter.both(*command) for command in commands]
    pairs.append(starter.both(*commands[-3], PROBE_METHODS="spawn forkserver"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # without the script's folder in its path
    with template(PROBE) as preloader:
        safe = Starter(tmp_path / "links", preloader)
        pairs += [safe.both(*command) for command in ([PROBE], ["folder"], ["-m", "none_such"])]
        for pair in pairs:
            assert_alike(pair)


HOW = re.findall(r'case "(.+)"', Path(program("ends.py")).read_text())


def ended(run: Run) -> tuple[int, str, list[str]]:
    """Exit code, stdout and stderr of a run."""
    code, out, err = run.wait()
    err = re.sub(r'^  File "<string>", line \d+, in <module>\n', "", err)  # the one frame below a script's own
    err = re.sub("0x[0-9a-f]+", "", err)
    return code, out, err.splitlines()


def test_a_forked_worker_ends_like_a_fresh_process(starter: Starter, tmp_path: Path) -> None:
    """Exit codes, signals, tracebacks and hooks of a file, a module and a folder."""
    (tmp_path / "folder").mkdir()
    for copy in ("module.py", "folder/__main__.py"):
        shutil.copy(program("ends.py"), tmp_path / copy)
    (tmp_path / "broken.py").write_text("x = 1\nx = = 1\n")
    commands = [["module.py", how] for how in HOW] + [["folder", "raise"]]
    modules = ("well", "chain", "interrupt", "number", "bad hook")
    commands += [["-m", "module", how] for how in modules]
    commands += [["broken.py"], ["-m", "broken"], ["-m", "none_such"], ["-m", "json"], ["none.py"]]
    pairs = {" ".join(command): starter.both(*command) for command in commands}
    found = {name: tuple(map(ended, pair)) for name, pair in pairs.items()}
    wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    assert not wrong, "\n".join(f"{name}: {line}" for name, pair in wrong.items() for line in pair)


HOLDER = """
import os, sys
class Last:
    held = [os.dup(0) for _ in range(500)]
    def __del__(self, exists=os.access, write=os.write):
        count = sum(exists(f"/proc/self/fd/{descriptor}", 0) for descriptor in self.held)
        write(1, b"%d of %d" % (count, len(self.held)))
sys.last = Last()  # goes when hardly anything else is left
"""


def test_descriptors_that_a_forked_script_keeps_open_are_not_closed(tmp_path: Path, monkeypatch) -> None:
    """Nothing of the template's closes a descriptor whose number has become the script's."""
    monkeypatch.setenv("PYTHONPATH", program("frail"))  # without what lets processes of tests end sooner
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    with template(str(script)) as preloader:
        run = Starter(tmp_path, preloader).start(preloader, (str(script),), {})
    assert run.wait() == (0, "500 of 500", "")


def ignore() -> None:
    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def launched(folder: Path, *launcher: str) -> dict[str, Any]:
    """What a worker of a job sees that has a terminal, a pipe, a variable without a name, and signals to ignore."""
    folder.mkdir()
    terminal, side = os.openpty()
    job = subprocess.Popen(
        ["/usr/bin/env", "=nameless", *launcher, PROBE],
        stdin=subprocess.PIPE,
        stdout=side,
        stderr=subprocess.DEVNULL,
        env=os.environ
        | {"TMPDIR": str(folder), "PROBE": str(folder / "probe"), "PROBE_PARENT": "0", "PROBE_STDIN": "1"},
        preexec_fn=ignore,  # noqa: PLW1509 (there is one thread)
    )
    os.close(side)
    job.communicate("é\nof two lines".encode(), timeout=120)
    printed = os.read(terminal, 4096)
    os.close(terminal)
    assert job.returncode == 0
    told = json.loads((folder / "probe").read_text())
    assert ["", "nameless"] in told["process"]["environment"]
    seen = {name: told[name] for name in ("streams", "stdin")} | {"printed": printed.decode()}
    return seen | {name: told["process"][name] for name in ("handlers", "mask", "descriptors", "limits", "threads")}


def test_a_forked_worker_sees_stdin_terminal_and_handlers_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    executed = launched(tmp_path / "executed", str(Path(sys.executable).with_name("fastckpt-run")))
    forked = launched(tmp_path / "forked", sys.executable, "-m", "fastckpt_run", "--fast-preload=math")
    assert not list(differences(executed, forked))
    assert forked["stdin"] == "é\nof two lines"
    assert forked["streams"]["stdout"]["terminal"]
    assert forked["handlers"][str(int(signal.SIGUSR2))] == str(signal.SIG_IGN)
