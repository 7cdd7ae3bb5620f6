"""`--fast-dry-run`: it says what the launch then does, and changes nothing."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from fastckpt._core.report.events import FOLDER
from fastckpt_run.dry_run.known_directories import known_directories
from fastckpt_run.main import main
from tests.cli.conftest import publish
from tests.conftest import _with_mark
from tests.e2e.launcher.conftest import FORK, Jobs, alive, pids_in, program, until
from tests.support.ports import free_port

TRAIN = program("train.py")


def snapshot(*folders: Path) -> dict[str, object]:
    """All that is in folders: kinds, modes, times of change, contents."""
    found: dict[str, object] = {}
    for path in sorted(each for folder in folders for each in [folder, *folder.rglob("*")]):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path)] = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, content)
    return found


def processes() -> list[int]:
    """This host's processes that have the mark of this test."""
    return _with_mark(os.environ["TEST_MARK"].encode())


def section(text: str, title: str) -> str:
    """The lines of a section, which ends with an empty one."""
    return next(part for part in text.split("\n\n") if part.startswith(title))


def test_a_dry_run_tells_of_the_job_that_lives_then_of_what_it_left_and_changes_nothing(jobs: Jobs):
    job = jobs.start(*FORK, TRAIN, "--steps", "12", "--every", "4", "--fail", "-12")
    log = jobs.folder / "log"
    until(lambda: log.exists() and "step 11" in log.read_text(), "step 11")
    running = processes()
    dry = jobs.run("--fast-dry-run", TRAIN)
    assert processes() == running and job.poll() is None
    of_directory = section(dry.stdout, "checkpoint directory")
    assert re.search(rf"in use by process {job.pid} on .*: a launch waits 60 s for it", of_directory)
    job.kill()
    job.wait()
    until(lambda: not any(map(alive, pids_in(jobs.folder))), "the end of the workers")

    places = (jobs.folder, Path(os.environ["FASTCKPT_SHM_DIR"]))
    before = snapshot(*places), processes()
    dry = jobs.run("--fast-dry-run", TRAIN, "--steps", "12", "--every", "4", TMPDIR=os.environ["TMPDIR"])
    assert (snapshot(*places), processes()) == before and not dry.stderr
    assert not [path for path in Path(os.environ["TMPDIR"]).iterdir() if not path.name.startswith("torchinductor_")]
    of_directory = section(dry.stdout, "checkpoint directory")
    assert f"checkpoint directory {jobs.folder / 'checkpoints'} (memory that a launch of train.py left" in of_directory
    assert "step 8 of history 1 whole: a launch adopts it" in of_directory
    assert "resume: step 8 of history 1 from memory" in of_directory
    jobs.run(*FORK, TRAIN, "--steps", "12", "--every", "4")
    steps = [line.split()[-1] for line in log.read_text().splitlines() if " step " in line]
    assert steps[11:] == ["9", "10", "11", "12"]


def test_options_are_shown_with_what_gave_them(here: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setenv("FASTCKPT_FLUSH", "no")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("FASTCKPT_SECRET", "a-secret-of-this-job-0123456789")
    endpoint = f"localhost:{free_port()}"
    shape = ["--nnodes", "2:4", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    script = [TRAIN, "--api-key", "hidden", "--token=hidden"]
    main(["--fast-dry-run", "--fast-slots", "2", *shape, "--rdzv-id", "j", *script])
    text = capfd.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in section(text, "OPTION").splitlines()}
    assert rows["--fast-slots"] == ["2", "option"]
    assert rows["--fast-flush"] == ["no", "variable", "FASTCKPT_FLUSH"]
    assert rows["--fast-max-stalls"] == ["3", "default"]
    assert rows["--max-restarts"] == ["3", "variable", "PET_MAX_RESTARTS"] and rows["--nnodes"] == ["2:4", "option"]
    assert "2 on each of 2 to 4 nodes: up to 8 ranks" in text and "3 at most" in text
    assert f"{TRAIN} --api-key *** --token=***" in text and "hidden" not in text and "a-secret" not in text
    assert f"endpoint {endpoint}: this host" in text and "the agent here would hold the store" in text
    assert "secret: in FASTCKPT_SECRET" in text
    assert "unknown until the script constructs its checkpointer: give the directory as an argument" in text


def test_candidates_that_would_not_do_are_listed_with_the_reason(here: Path, capfd):
    run = here / "run"
    for step in (10, 20):
        publish(run, step)
    os.truncate(run / "checkpoint-20/model.pt", 10)
    main(["--fast-dry-run", TRAIN, "--checkpoint-dir", str(run)])
    text = section(capfd.readouterr().out, "checkpoint directory")
    assert f"checkpoint directory {run} (--checkpoint-dir of the script)" in text
    assert "resume: step 10 of history 1 from storage" in text
    assert re.search("passes over step 20 of history 1 from storage: damaged: ", text)
    assert "memory needed: 3 slots of " in text


SCRIPT = """
import argparse
from fastckpt import DdpCheckpointer
parser = argparse.ArgumentParser()
parser.add_argument("--ckpt-dir", default="of-the-option")
parser.add_argument("--checkpoint-every", default="10")
checkpointer = DdpCheckpointer("in-the-source")
other = DdpCheckpointer(parser.parse_args().ckpt_dir)
"""


def test_directories_are_known_by_arguments_source_and_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    (tmp_path / "used" / FOLDER).mkdir(parents=True)
    (tmp_path / "data").mkdir()

    def known(*arguments: str) -> dict[str, str]:
        found = known_directories([*arguments], os.environ["FASTCKPT_SHM_DIR"])
        return {directory.removeprefix(f"{tmp_path}/"): how for directory, how in found}

    assert known("train.py") == {
        "of-the-option": "the default of --ckpt-dir in line 5 of the script",
        "in-the-source": "DdpCheckpointer in line 7 of the script",
    }
    given = known("train.py", "--ckpt-dir=new", "--data", "data", "used", "s3://bucket/run/", "--checkpoint-every", "5")
    assert given == {
        "new": "--ckpt-dir of the script",
        "used": "an argument of the script",
        "s3://bucket/run": "an argument of the script",
        "in-the-source": "DdpCheckpointer in line 7 of the script",
    }
    assert known("-m", "train", "used").keys() == {"used", "of-the-option", "in-the-source"}
    assert known("missing.py", "used").keys() == {"used"}
    Path("broken.py").write_text("def (")
    assert known("broken.py") == {}
