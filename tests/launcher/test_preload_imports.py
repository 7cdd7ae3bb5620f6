"""What a template imports for a script, what it refuses to keep, and when workers are executed instead."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastckpt_run.preload.launcher import ForkedWorker, Preloader
from fastckpt_run.preload.script import read
from tests.launcher.conftest import Jobs, program
from tests.launcher.preloading import Starter, template

FRAIL = program("frail")


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


@pytest.mark.parametrize(
    ("source", "imports", "sets"),
    [
        ("import a, b.c as d", ["a", "b.c"], []),
        ("from a.b import c\nfrom . import d\nfrom e import *", ["a.b", "e"], []),
        ("try:\n  import a\nexcept ImportError:\n  import b", ["a"], []),
        ("if TYPE_CHECKING:\n  import a\nif __name__ == '__main__':\n  import b", ["b"], []),
        ("def f():\n  import a\nclass C:\n  import b\nwith x:\n  import c", ["c"], []),
        ("import os\nos.environ['A'] = '1'\nimport torch\nos.environ['B'] = '1'", ["os", "torch"], ["A"]),
        (
            "import os\nos.environ.setdefault('A', '1')\nos.environ.update({'B': '', 'C': ''})\nimport a",
            ["os", "a"],
            list("ABC"),
        ),
        ("import os\nfor k in x:\n  os.environ[k] = ''\nimport a", ["os", "a"], ["*"]),
        ("import os\nos.environ |= x\nimport a", ["os", "a"], ["*"]),
        ("import os\nos.environ.update(A='', **x)\nimport a", ["os", "a"], ["*", "A"]),
        ("from os import environ\ndel environ['A']\nif y:\n  environ['B'] = ''\nimport a", ["os", "a"], ["A", "B"]),
        ("load_dotenv()\nimport a", ["a"], ["*"]),
        ("import os\nprint(os.environ['A'], os.environ.get('B'))\nimport a", ["os", "a"], []),
    ],
)
def test_what_a_script_imports(tmp_path: Path, source: str, imports: list[str], sets: list[str]) -> None:
    write(tmp_path, train=source)
    script = read([str(tmp_path / "train.py")])
    assert [name for name, _ in script.imports] == imports
    assert script.sets == set(sets)
    assert script.folder == tmp_path


@pytest.mark.parametrize(
    ("source", "first"),
    [
        ("'text'\nfrom __future__ import annotations\nimport a\nX = 3\nimport b", ["__future__", "a", "b"]),
        ("import a\na.use('x')\nimport b", ["a"]),
        ("import a\nimport os\nos.environ['A'] = ''\nimport b", ["a", "os"]),
        ("import a\na.b = 3\nimport b", ["a"]),
        ("try:\n  import a\nexcept ImportError:\n  a = None\nimport b", ["a", "b"]),
        ("import a\nif a.b:\n  a.c()\nimport b", ["a"]),
        ("import a\ndef f():\n  a.b()\nimport b", ["a", "b"]),
    ],
)
def test_which_imports_nothing_can_have_an_effect_on(tmp_path: Path, source: str, first: list[str]) -> None:
    write(tmp_path, train=source)
    assert [name for name, _ in read([str(tmp_path / "train.py")]).first_imports] == first


def test_where_a_script_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package" / "inner").mkdir(parents=True)
    for name in ("__init__", "train", "__main__", "inner/__init__", "inner/deep"):
        (tmp_path / "package" / f"{name}.py").write_text("import numpy")
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError('imported by the agent')")
    for arguments in (["-m", "package.train"], ["-m", "package"], ["-m", "package.inner.deep"], ["package"]):
        assert read(arguments).imports == [("numpy", [])], arguments
    write(tmp_path, broken="import a\nx = = 1")
    for arguments in (["-m", "none.such"], ["none.py"], ["broken.py"]):
        assert read(arguments).imports == []


SPOILERS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "started a thread",
    ),
    "descriptor": ("import os\nkept = open('/dev/null')", "opened /dev/null"),
    "variable": ("import os\nos.environ['X_NEW'] = '1'", "changed the variable X_NEW"),
    "rank": ("import os\nrank = os.environ.get('RANK', '0')", "read the variable RANK, which differs between workers"),
    "list": ("import os\nfound = dict(os.environ)", "read the variable FASTCKPT_"),
    "handler": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "changed the handler of SIGUSR1"),
    "generator": ("import random\nrandom.seed(0)", "used the random generator of random"),
    "folder": ("import os\nos.chdir('/')", "changed the working directory"),
    "raises": ("import none_such", "raised ModuleNotFoundError: No module named 'none_such'"),
    "exits": ("raise SystemExit", "raised SystemExit"),
    "traces": ("import sys\nsys.setprofile(lambda *_: None)", "is traced"),
    "native": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.timer_create  # where threads are made\n"
        "import ctypes\nnumber = ctypes.c_ulong()\nlibc.pthread_create(ctypes.byref(number), None, libc.pause, None)",
        "started a thread in native code",
    ),
}


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Starter]]:
    """Starters with a template that does not import torch."""
    monkeypatch.setenv("PYTHONPATH", f"{FRAIL}:{tmp_path / 'modules'}")
    (tmp_path / "modules").mkdir()
    monkeypatch.chdir(tmp_path)
    open_ones = []

    def start(script: str, modules: str) -> Starter:
        context = template(script, modules)
        open_ones.append(context)
        return Starter(tmp_path, context.__enter__())

    yield start
    for context in open_ones:
        context.__exit__(None, None, None)


SCRIPT = "import json, os, sys\njson.dump(sorted(sys.modules), open(os.environ['PROBE'], 'w'))\n"


@pytest.mark.parametrize("kind", SPOILERS)
def test_a_module_that_spoils_a_template_is_left_out(
    kind: str, plain: Callable[..., Starter], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog
) -> None:
    """The next template does without it, and says why; other modules are there."""
    source, why = SPOILERS[kind]
    write(tmp_path / "modules", spoiler=source, harmless="")
    write(tmp_path, train=SCRIPT)
    starter = plain("train.py", "harmless,spoiler,colorsys")
    run = starter.start(starter.template, ("train.py",), {})
    assert run.wait() == (0, "", "")
    assert type(run.handler.proc) is ForkedWorker
    modules = run.told()
    assert ("harmless" in modules, "spoiler" in modules, "colorsys" in modules) == (True, False, True)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"spoiler is not preloaded: it {why}")


def test_what_modules_print_is_printed_by_each_worker(plain: Callable[..., Starter], tmp_path: Path) -> None:
    write(tmp_path / "modules", chatty="import os\nprint('imported')\nos.write(2, b'warning')")
    write(tmp_path, train="import chatty\nprint('run')")
    starter = plain("train.py", "chatty")
    runs = starter.both("train.py")
    assert [run.wait() for run in runs] == [(0, "imported\nrun\n", "warning")] * 2
    assert [type(run.handler.proc) for run in runs] == [subprocess.Popen, ForkedWorker]


def test_installed_modules_of_the_script_are_imported_by_themselves(tmp_path: Path, monkeypatch) -> None:
    """Not its own: these may change from one restart to the next."""
    monkeypatch.setenv("PYTHONPATH", FRAIL)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, train=f"import numpy, click, wrapt\nimport mine\n{SCRIPT}", mine="print('mine')", wrapt="")
    with template("train.py", "auto") as preloader:
        starter = Starter(tmp_path, preloader)
        run = starter.start(preloader, ("train.py",), {})
        assert run.wait() == (0, "mine\n", "")
        write(tmp_path, train=SCRIPT)
        again = starter.start(preloader, ("train.py",), {})
    assert again.wait() == (0, "", "")
    assert {"numpy", "click"} <= set(again.told())
    assert not {"mine", "wrapt"} & set(again.told())


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"train": "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport json"}, "the script sets OMP_NUM_THREADS"),
        ({"train": "import os\nos.environ.update(os.environ)\nimport json"}, "the script sets variables before"),
        ({"train": "import queue", "queue": ""}, "queue.py has the name of a module that torch imports"),
    ],
)
def test_scripts_that_must_be_executed(tmp_path: Path, sources: dict[str, str], why: str, monkeypatch, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **sources)
    with template("train.py", "math") as preloader:
        starter = Starter(tmp_path, preloader)
        runs = [starter.start(preloader, ("train.py",), {}) for _ in range(2)]
    assert [(run.wait(), type(run.handler.proc)) for run in runs] == [((0, "", ""), subprocess.Popen)] * 2
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("workers start without preloaded modules: ")
    assert why in message


def test_a_template_does_not_outlive_what_it_has_inherited(plain, tmp_path: Path, monkeypatch) -> None:
    """A variable that was read, the folder, the umask: what is asked for under other circumstances is executed."""
    write(tmp_path / "modules", reader="import os\nos.environ.get('X_READ')")
    write(tmp_path, train=SCRIPT)
    script = str(tmp_path / "train.py")
    starter = plain(script, "reader")

    def kind() -> type:
        run = starter.start(starter.template, (script,), {})
        assert run.wait() == (0, "", "")
        starter.template.prepare()
        return type(run.handler.proc)

    assert kind() is ForkedWorker
    monkeypatch.setenv("X_UNREAD", "1")
    assert kind() is ForkedWorker
    monkeypatch.setenv("X_READ", "1")
    assert (kind(), kind()) == (subprocess.Popen, ForkedWorker)
    monkeypatch.chdir("/")
    assert (kind(), kind()) == (subprocess.Popen, ForkedWorker)
    umask = os.umask(0o077)
    assert (kind(), kind()) == (subprocess.Popen, ForkedWorker)
    os.umask(umask)


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (["--no-python", program("touch.sh")], {}, "they run "),
        (["--run-path", program("touch.py")], {}, "--run-path starts them in its own way"),
        ([program("touch.py")], {"PYTHON_EXEC": "{link}"}, "they run {link}, not this Python"),
    ],
)
def test_other_ways_to_start_workers(
    jobs: Jobs, tmp_path: Path, arguments: list[str], environment: dict[str, str], why: str
) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    told = tmp_path / "events"
    variables = {name: value.format(link=link) for name, value in environment.items()}
    job = jobs.run("--fast-preload=auto", f"--fast-events={told}", *arguments, **variables)
    assert job.returncode == 0, job.stderr
    events = [json.loads(line) for line in told.read_text().splitlines()]
    (fallback,) = [event["why"] for event in events if event["event"].startswith("preload")]
    assert fallback.startswith(why.format(link=link))
    assert f"fastckpt-run: workers start without preloaded modules: {fallback}" in job.stderr.splitlines()


def test_workers_bound_by_numactl_are_executed(plain: Callable[..., Starter], tmp_path: Path, caplog) -> None:
    write(tmp_path, train="")
    preloader = plain("train.py", "math").template
    assert (
        preloader.fork(["numactl", "--physcpubind=0", sys.executable, "-u", "train.py"], os.environ, [0, 1, 2]) is None
    )
    assert "numactl starts them" in caplog.text


def test_off_is_off() -> None:
    for word in ("off", "no", "0", ""):
        preloader = Preloader(word)
        preloader.begin(None)
        assert preloader.fork([], {}, []) is None
