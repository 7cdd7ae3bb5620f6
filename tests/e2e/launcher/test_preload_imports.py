"""Imports of a template for a script, modules it refuses to keep, and scripts that are executed instead."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from fastckpt_run.preload.preloader import ForkedWorker, Preloader
from fastckpt_run.script_analysis import read
from tests.e2e.launcher.conftest import LIGHT
from tests.e2e.launcher.preloading import Starter, template


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


IMPORTS = [
    ("import a, b.c as d", "a b.c", "a b.c", ""),
    ("try:\n  import a\nexcept ImportError:\n  import b", "a", "a", ""),
    ("if TYPE_CHECKING:\n  import a\nif __name__ == '__main__':\n  import b", "b", "", ""),
    ("def f():\n  import a\nclass C:\n  import b\nwith x:\n  import c", "c", "c", ""),
    ("import os\nos.environ['A'] = '1'\nimport torch\nos.environ['B'] = '1'", "os torch", "os", "A"),
    ("import os\nos.environ.setdefault('A', '1')\nos.environ.update({'B': ''})\nimport a", "os a", "os", "A B"),
    ("import os\nos.environ.update(A='', **x)\nimport a", "os a", "os", "* A"),
    ("load_dotenv()\nimport a", "a", "", "*"),
    ("import os\nprint(os.environ['A'], os.environ.get('B'))\nimport a", "os a", "os", ""),
    ("import os\ndef f():\n  os.environ['A'] = ''\nf()\nimport a", "os a", "os", "A"),
    ("'text'\nfrom __future__ import x\nimport a\nX = 3\nimport b", "__future__ a b", "__future__ a b", ""),
    ("try:\n  import a\nexcept ImportError:\n  a = None\nimport b", "a b", "a b", ""),
    ("import a\nif a.b:\n  a.c()\nimport b", "a b", "a", ""),
    ("import a\ndef f():\n  a.b()\nimport b", "a b", "a b", ""),
]
"""Sources of scripts, what they import, what of that first, and the variables that they set before it."""


def test_a_template_imports_what_the_script_imports_before_other_effects(tmp_path: Path) -> None:
    for source, imports, first, sets in IMPORTS:
        write(tmp_path, train=source)
        script = read([str(tmp_path / "train.py")])
        assert [name for name, _ in script.imports] == imports.split(), source
        assert [name for name, _ in script.first_imports] == first.split(), source
        assert script.sets == set(sets.split()) and script.folder == tmp_path, source


SCANNING = """
import os
from importlib import import_module
from fastckpt_run.preload.environment import recorded
KEEP = {"tqdm": "TQDM_NCOLS", "networkx": "NETWORKX_FALLBACK_TO_NX", "fsspec": "FSSPEC_FILE_AUTO_MKDIR"}
for module, variable in KEEP.items():
    os.environ |= {"RANK": "1", variable: "1"}
    with recorded() as read:
        import_module(module)
        kept = {"RANK", variable} & read
        dict(os.environ)
    print(*sorted(kept), {"RANK", variable} <= read)
"""


def test_a_module_that_iterates_over_the_environment_reads_what_it_keeps() -> None:
    """These do: tqdm, which torch imports where it is installed, networkx with its compiler, fsspec with Lightning."""
    said = subprocess.check_output([sys.executable, "-c", SCANNING], text=True, timeout=60)
    assert said == "TQDM_NCOLS True\nNETWORKX_FALLBACK_TO_NX True\nFSSPEC_FILE_AUTO_MKDIR True\n"


def test_the_template_finds_the_script_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    pipe, end = os.pipe()
    os.write(end, b"import numpy")
    os.close(end)
    assert read([f"/dev/fd/{pipe}"]).imports == []
    assert os.read(pipe, 99) == b"import numpy", "it is left to the worker"
    os.close(pipe)


def sets(name: str) -> str:
    return f"import os\nos.environ['{name}'] = '1'\n"


def test_variables_that_modules_of_the_script_set_before_imports_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last import, through packages and relative imports, once each; not in what has another home."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "deep").mkdir(parents=True)
    write(tmp_path, train=f"import own.deep.leaf, json\nfrom own import b\n{sets('LAST')}")
    write(tmp_path / "own", __init__=sets("INIT"), b=f"from .deep import c\n{sets('B')}", a="")
    write(tmp_path / "own" / "deep", __init__=sets("DEEP"), leaf="from .. import a, b", c=f"{sets('C')}import own")
    assert read(["train.py"]).sets == {"INIT", "DEEP", "C", "B"}
    write(tmp_path / "own", train="from . import b", __main__="from .deep import leaf")
    assert read(["-m", "own.train"]).sets == {"INIT", "DEEP", "C"}
    assert read(["-m", "own"]).sets == {"INIT", "DEEP", "C"}
    changing = read(["train.py"])
    assert not changing.has_changed()
    write(tmp_path / "own", b=sets("NEW"))
    assert changing.has_changed()


SPOILERS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "started a thread",
    ),
    "descriptor": ("import os\nkept = open('/dev/null')", "opened /dev/null"),
    "variable": ("import os\nos.environ['X_NEW'] = '1'", "changed the variable X_NEW"),
    "rank": ("import os\nrank = os.environ.get('RANK', '0')", "read the variable RANK, which differs between workers"),
    "list": ("import os\nfound = dict(os.environ)", "read the variable FASTCKPT_"),
    "process": ("import subprocess\nkept = subprocess.Popen(['true'])", "started a process"),
    "lock": ("import multiprocessing\nkept = multiprocessing.Lock()", "mapped memory that forks share (/dev/shm/"),
    "stream": ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)", "changed sys.stdout"),
    "path": ("import sys\nsys.path.insert(0, '/none')", "changed the first entry of sys.path"),
    "arguments": ("import sys\nsys.argv.append('x')", "changed sys.argv"),
    "odd": ("raise BaseException('x' * 10**6)", "raised BaseException: xxx"),
    "handler": ("import signal\nsignal.signal(signal.SIGUSR1, print)", "changed the handler of SIGUSR1"),
    "generator": ("import random\nrandom.getrandbits(9)\nrandom.seed(0)", "used the random generator of random"),
    "numpy": ("import numpy\nkept = numpy.random.default_rng()", "made a random generator without a seed"),
    "folder": ("import os\nos.chdir('/')", "changed the working directory"),
    "raises": ("import none_such", "raised ModuleNotFoundError: No module named 'none_such'"),
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
    monkeypatch.setenv("PYTHONPATH", f"{LIGHT}:{tmp_path / 'modules'}")
    (tmp_path / "modules").mkdir()
    monkeypatch.chdir(tmp_path)
    with ExitStack() as templates:
        yield lambda *script: Starter(tmp_path, templates.enter_context(template(*script)))


SCRIPT = "import json, os, sys\njson.dump(sorted(sys.modules), open(os.environ['PROBE'], 'w'))\n"


OUTCOMES = """
import json, os, sys
from fastckpt_run.preload import imports

imports.BASE = ("multiprocessing",)
out = os.dup(1)
for name in sys.argv[1:]:
    if not os.fork():
        outcome = imports.preload(lambda: imports.ImportPlan(asked=[("harmless", []), (name, [])]))
        os.write(out, json.dumps([outcome.module, outcome.fault]).encode() + b"\\n")
        os._exit(0)
    os.wait()
"""
"""Each module's outcome, in a process of its own."""
HARMLESS = "import random, subprocess\nsubprocess.run(['true'])\nimport numpy.random\nrandom.getrandbits(99999)"


def test_a_module_that_is_unsafe_to_fork_is_recognized_with_the_reason(tmp_path: Path) -> None:
    names = [f"spoiler{number}" for number in range(len(SPOILERS))]
    sources = [source for source, _ in SPOILERS.values()]
    write(tmp_path, harmless=HARMLESS, **dict(zip(names, sources, strict=True)))
    environment = os.environ | {"PYTHONPATH": f"{LIGHT}:{tmp_path}"}
    command = [sys.executable, "-c", OUTCOMES, *names]
    said = subprocess.check_output(command, env=environment, text=True, timeout=120).splitlines()
    for name, (_, why), line in zip(names, SPOILERS.values(), said, strict=True):
        module, fault = json.loads(line)
        assert module == name and fault.startswith(why) and len(fault) < 2000, line


def test_a_module_that_is_unsafe_to_fork_is_not_preloaded(
    plain: Callable[..., Starter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next template does without it, and says why; other modules are there."""
    source, why = SPOILERS["thread"]
    write(tmp_path / "modules", spoiler=source, harmless=HARMLESS)
    write(tmp_path, train=SCRIPT)
    starter = plain("train.py", "harmless,spoiler,colorsys")
    since = starter.template._template.started
    run = starter.start(starter.template, ("train.py",), {})
    assert run.wait() == (0, "", "") and type(run.handler.proc) is ForkedWorker
    modules = run.told()
    assert ("harmless" in modules, "spoiler" in modules, "colorsys" in modules) == (True, False, True)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(f"spoiler is not preloaded: it {why}")
    assert starter.template._template.started == since, "the next template has no more time than the first"


KEEPER = """
import os
def _get_rank():
    return int(os.environ["RANK"]) if "RANK" in os.environ else None
def rank_zero_only():
    pass
rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)
"""
"""As Lightning has it."""
UNLIKE = {
    "another name": (KEEPER.replace("zero_only.rank", "zero_only.number"), "in a way that is not known"),
    "more than the rank": (KEEPER.replace("or 0)", "or 0) + 1"), "keep another rank than it reads"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_module_that_keeps_the_rank_is_preloaded_if_workers_can_have_it_read_again(
    kind: str, plain: Callable[..., Starter], tmp_path: Path, caplog
) -> None:
    """Another release of Lightning may keep it in another way: it is left to the workers then, with the reason."""
    keeper, why = UNLIKE[kind]
    package = tmp_path / "modules" / "lightning_fabric"
    (package / "utilities").mkdir(parents=True)
    write(package, __init__="from . import utilities")
    write(package / "utilities", __init__="from . import rank_zero", rank_zero=keeper)
    script = "from lightning_fabric.utilities import rank_zero\nprint(vars(rank_zero.rank_zero_only))"
    write(tmp_path, train=f"import sys\nprint('lightning_fabric' in sys.modules)\n{script}")
    executed, forked = plain("train.py", "colorsys,lightning_fabric").both("train.py", RANK="5")
    assert forked.wait() == executed.wait()
    assert forked.text("out").startswith("False") and why in caplog.text


def test_output_of_imported_modules_is_printed_by_each_worker(plain: Callable[..., Starter], tmp_path: Path) -> None:
    write(tmp_path / "modules", chatty="import os\nprint('imported')\nos.write(2, b'warning')")
    write(tmp_path, train="import chatty\nprint('run')")
    starter = plain("train.py", "chatty")
    runs = starter.both("train.py")
    assert [run.wait() for run in runs] == [(0, "imported\nrun\n", "warning")] * 2
    assert [type(run.handler.proc) for run in runs] == [subprocess.Popen, ForkedWorker]


def test_installed_modules_are_preloaded_and_modules_of_the_script_are_not(tmp_path: Path, monkeypatch) -> None:
    """Its own may change from one restart to the next; workers keep the fastckpt of their agent, wherever that is."""
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    monkeypatch.chdir(tmp_path)
    imports = "import fastckpt._core.policy.retention, numpy, click, wrapt\nimport mine"
    write(tmp_path, train=f"{imports}\n{SCRIPT}", mine="print('mine')", wrapt="")
    with template("train.py", "auto") as preloader:
        starter = Starter(tmp_path, preloader)
        assert starter.start(preloader, ("train.py",), {}).wait() == (0, "mine\n", "")
        write(tmp_path, train=SCRIPT)
        again = starter.start(preloader, ("train.py",), {})
    assert again.wait() == (0, "", "")
    assert {"numpy", "click", "fastckpt._core.policy.retention"} <= set(again.told())
    assert not {"mine", "wrapt"} & set(again.told())


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"train": "import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport json"}, "the script sets OMP_NUM_THREADS"),
        ({"train": "import json", "json": ""}, "json.py has the name of a module that torch imports"),
        (
            {"train": "import os\nos.environ['X'] = '3'\nimport json", "reader": "import os\nos.environ.get('X')"},
            "the script sets X before it imports",
        ),
    ],
)
def test_scripts_that_cannot_be_forked_are_executed(
    tmp_path: Path, sources: dict[str, str], why: str, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", LIGHT)
    write(tmp_path, **sources)
    with template("train.py", "reader" if "reader" in sources else "math") as preloader:
        starter = Starter(tmp_path, preloader)
        runs = [starter.start(preloader, ("train.py",), {}) for _ in range(2)]
    assert [(run.wait(), type(run.handler.proc)) for run in runs] == [((0, "", ""), subprocess.Popen)] * 2
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("workers start without preloaded modules: ")
    assert why in message


def test_a_template_is_replaced_when_environment_folder_or_umask_change(plain, tmp_path: Path, monkeypatch) -> None:
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

    gone = tmp_path / "gone"
    gone.mkdir()
    usual = os.umask(0)
    os.umask(usual)

    def leave() -> None:
        os.umask(usual)
        monkeypatch.chdir(gone)

    changes = [
        lambda: monkeypatch.setenv("X_READ", "1"),
        lambda: monkeypatch.chdir("/"),
        lambda: os.umask(0o077),
        leave,
        gone.rmdir,
        lambda: monkeypatch.chdir(tmp_path),
    ]
    assert kind() is ForkedWorker
    monkeypatch.setenv("X_UNREAD", "1")
    assert kind() is ForkedWorker
    for change in changes:
        change()
        assert (kind(), kind()) == (subprocess.Popen, ForkedWorker)
    write(tmp_path, train=f"import os\nos.environ['LANG'] = ''\n{SCRIPT}")
    starter.template.prepare()
    assert (kind(), kind()) == (subprocess.Popen, subprocess.Popen)


def test_named_modules_beside_the_script_are_preloaded_and_reloaded_when_changed(plain, tmp_path: Path) -> None:
    """They see the script's arguments; when a file has changed, workers get the new one, as when they are executed."""
    write(tmp_path, mine="import sys\nseen = 'old', sys.argv", other="import mine")
    write(tmp_path, train="import sys\nloaded = 'other' in sys.modules\nimport mine, other\nprint(loaded, mine.seen)")
    starter = plain("train.py", "other", "--lr", "1")

    def printed() -> str:
        return starter.start(starter.template, ("train.py", "--lr", "1"), {}).wait()[1]

    assert [printed(), printed()] == ["True ('old', ['train.py', '--lr', '1'])\n"] * 2
    write(tmp_path, mine="import sys\nseen = 'new', sys.argv")
    assert printed() == "False ('new', ['train.py', '--lr', '1'])\n"
    starter.template.prepare()
    assert printed() == "True ('new', ['train.py', '--lr', '1'])\n"
    assert read(["-m", "train"]).argv(["-m", "train", "x"]) == [str(tmp_path / "train.py"), "x"]


def test_a_closed_stream_is_not_replaced_by_a_file_of_the_agents(plain, tmp_path: Path, caplog) -> None:
    write(tmp_path, train="import sys\nprint(sys.stdin)")
    starter = plain("train.py", "math")
    kept = os.dup(0)
    os.close(0)
    taken = os.open("/dev/null", os.O_RDONLY)
    try:
        run = starter.start(starter.template, ("train.py",), {})
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert (taken, run.wait()) == (0, (0, "None\n", ""))
    assert "they inherit no stdin, which is closed" in caplog.text


@pytest.mark.parametrize(
    ("entrypoint", "starter", "why"),
    [
        (sys.executable, ["numactl", "--physcpubind=0", sys.executable], "numactl starts them"),
        (print, [sys.executable], "--run-path starts them in its own way"),
        ("sh", [sys.executable], "they run sh, not this Python"),
    ],
)
def test_workers_started_in_other_ways_are_executed_with_the_reason(
    entrypoint: Any, starter: list[str], why: str, caplog
) -> None:
    preloader = Preloader("auto")
    preloader.begin(WorkerSpec("test", 1, None, entrypoint=entrypoint, args=("-u", "train.py")))
    if entrypoint != sys.executable:
        preloader.prepare()
    assert preloader.fork([*starter, "-u", "train.py"], os.environ, [0, 1, 2]) is None
    assert f"workers start without preloaded modules: {why}" in caplog.text
    preloader.close()
