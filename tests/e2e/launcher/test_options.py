"""Options of fastckpt-run: their positions, meanings, and errors."""

import platform
import re
import signal
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from fastckpt._core.config import Settings
from fastckpt._core.version import VERSION
from fastckpt.errors import ConfigError
from fastckpt_run.cli import main as inspect_checkpoints
from fastckpt_run.main import _without_ignored, main
from fastckpt_run.options import GROUPS, LauncherParser, parse
from tests.e2e.launcher.conftest import program

TOUCH = program("touch.py")


@pytest.fixture(autouse=True)
def own_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No FASTCKPT variables but those that a test sets."""
    monkeypatch.delenv("FASTCKPT_SHM_DIR", raising=False)
    monkeypatch.delenv("FASTCKPT_PRELOAD", raising=False)


def settings(*argv: str) -> Settings:
    return parse([*argv, "train.py"])[0]


def test_each_setting_has_an_option() -> None:
    expected = {"--fast-no-preload", "--fast-dry-run"}
    for field in fields(Settings):
        name = field.name.replace("_", "-")
        expected |= {f"--fast-{name}", *([f"--fast-no-{name}"] if isinstance(field.default, bool) else [])}
    assert set(LauncherParser().ours) == expected and len(expected) > 40
    assert {name for group in GROUPS.values() for name in group} == {field.name for field in fields(Settings)}


def test_an_option_goes_before_its_variable_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings() == Settings()
    monkeypatch.setenv("FASTCKPT_SLOTS", "2")
    monkeypatch.setenv("FASTCKPT_FLUSH", "no")
    assert settings() == Settings(slots=2, flush=False)
    assert settings("--fast-slots=3", "--fast-flush") == Settings(slots=3)


def test_the_no_memory_option_places_arenas_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert settings().arenas == settings("--fast-memory").arenas == "/dev/shm"
    assert settings("--fast-no-memory").arenas == "/scratch"
    assert settings("--fast-no-memory", "--fast-shm-dir=/large").arenas == "/large"
    assert settings("--fast-no-memory").elsewhere == ["/dev/shm"] and settings().elsewhere == ["/scratch"]
    monkeypatch.setenv("FASTCKPT_MEMORY", "off")
    monkeypatch.delenv("TMPDIR")
    assert settings().arenas == "/var/tmp"
    assert settings("--fast-memory").arenas == "/dev/shm"
    monkeypatch.setenv("FASTCKPT_MEMORY", "little")
    with pytest.raises(ConfigError, match="FASTCKPT_MEMORY is 'little'; give yes or no"):
        settings()


def test_no_preload_is_a_flag_and_the_last_one_counts() -> None:
    assert settings("--fast-preload", "numpy,math").preload == "numpy,math"
    assert settings("--fast-preload=numpy", "--fast-no-preload").preload == "off"
    assert settings("--fast-no-preload", "--fast-preload=auto").preload == "auto"


def test_a_file_mode_is_octal_and_an_impossible_one_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("0640", "0o640"):
        assert settings("--fast-file-mode", mode).mode == 0o640
        monkeypatch.setenv("FASTCKPT_FILE_MODE", mode)
        assert settings().mode == 0o640 and settings("--fast-file-mode=").mode is None
    for mode in ("0400", "0777", "4640", "u=rw"):
        says = f"file_mode is '{mode}'; give an octal mode from 0600 to 0666 .* as 0640"
        with pytest.raises(ConfigError, match=says):
            settings(f"--fast-file-mode={mode}")


REFUSED = [
    (["--fast-sl", "2", "t.py"], 2, "no such option: --fast-sl; names are given in full: --fast-slots"),
    (["--fast-bogus", "t.py"], 2, "no such option: --fast-bogus; names are given in full: --fast-shm-dir"),
    (["--fast-slots", "many", "t.py"], 2, "--fast-slots is 'many'"),
    (["--fast-flush=1", "t.py"], 2, "--fast-flush"),
    (["--fast-summary=long", "t.py"], 2, "summary is 'long'; give short or full (--fast-summary"),
    (["--fast-slots"], 2, "argument --fast-slots: expected one argument"),
    (["--fast-slots=7", "t.py"], 2, "slots is 7"),
    (["--fast-max-stalls=-1", "t.py"], 2, "max_stalls is -1; give a number of failures, or 0 for no limit"),
    (["--fast-spares=-1", "t.py"], 2, "spares is -1; give a number of hosts, or 0 for none"),
    (["--fast-replicas=3", TOUCH], 2, "replicas is '3'; give 0, 1 or 2 copies, xor:3 to xor:16"),
    (["--fast-replicas=xor:2", TOUCH], 2, "replicas is 'xor:2'; give 0, 1 or 2 copies, xor:3 to xor:16"),
    (["--fast-replica-mbps=-1", TOUCH], 2, "replica_mbps is -1.0; give 1 MB per second or more, or 0"),
    (
        ["--fast-replica-medium=disk", TOUCH],
        2,
        "replica_medium is 'disk'; give memory, or disk:DIR with the absolute",
    ),
    (["--fast-replica-medium=tape:/x", TOUCH], 2, "replica_medium is 'tape:/x'; give memory, or disk:DIR"),
    (["--fast-replica-medium=disk:/nowhere", TOUCH], 2, "no copies can be kept in /nowhere: No such file or direc"),
    (["--fast-spares=1", "--nnodes=2", TOUCH], 2, "spares is 1 (--fast-spares), and --rdzv-backend is static"),
    (["--fast-spares=1", "--standalone", TOUCH], 2, "spares is 1 (--fast-spares), and --standalone is given"),
    (["--fast-spares=2", "--rdzv-backend=c10d", TOUCH], 2, "spares is 2 (--fast-spares), and --nnodes is 1"),
    (["--fast-restart-budget=3", TOUCH], 2, "restart_budget is '3'; give RESTARTS/TIME, both above 0"),
    (["--bogus", "t.py"], 2, "unrecognized arguments: --bogus"),
    ([], 2, "the following arguments are required: training_script"),
    (["--max-restarts=x", "t.py"], 2, "invalid int value: 'x'"),
    (["--nproc-per-node=several", "t.py"], 1, "Unsupported nproc_per_node value: several"),
    (["--nproc-per-node=0", TOUCH], 1, "--nproc-per-node is 0; give 1 or more workers, auto, cpu or gpu"),
    (["--monitor-interval=0", TOUCH], 1, "--monitor-interval is 0; give seconds above 0"),
    (["--nnodes=1:2:3", "t.py"], 1, "nnodes=1:2:3"),
    (["--no-python", "-m", "t.py"], 1, "Don't use both"),
    (["--redirects=9", "t.py"], 1, "9 does not match"),
    (["--rdzv-conf=join_timeout=x", TOUCH], 1, "join_timeout is 'x' in --rdzv-conf; give a number above 0"),
    (["--fast-secret-file=/none/such", TOUCH], 2, "the secret cannot be read from /none/such: No such file"),
    (["--fast-events=/none/such", TOUCH], 2, "events cannot be written to /none/such: No such file"),
    (["missing.py"], 1, "no such script: missing.py"),
    (["--run-path", "/missing.py"], 1, "no such script: /missing.py"),
    (["t.py"], 2, "FASTCKPT_SLOTS is 'many'; give a whole number"),
]
"""Command lines, the exit codes, and what the one line of the error says; the last is of a variable."""


def test_an_error_of_the_command_line_or_a_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    for argv, code, message in REFUSED:
        if message.startswith("FASTCKPT_SLOTS"):
            monkeypatch.setenv("FASTCKPT_SLOTS", "many")
        for dry in ([], ["--fast-dry-run"]):
            with pytest.raises(SystemExit) as exit:
                main([*dry, *argv])
            lines = capfd.readouterr().err.splitlines()
            errors = [line for line in lines if line.startswith("fastckpt-run: error: ")]
            assert exit.value.code == code and errors == lines[-1:] and message in errors[0], (argv, lines)
            assert "Traceback" not in "".join(lines)


def test_help_shows_each_option_of_ours_in_a_line_and_how_to_see_those_of_torchrun(capfd) -> None:
    main(["--help"])
    text = capfd.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for field in fields(Settings):
        name = field.name.replace("_", "-")
        option = rf"--fast-\[no-\]{name}" if isinstance(field.default, bool) else rf"--fast-{name} [A-Z/]+"
        assert re.search(rf"^  {option} +[A-Z].*[a-z]{{3}}", text, re.MULTILINE), name
    assert "--fast-dry-run" in text and "torchrun --help" in text and "PET_" in text
    assert "Slots for checkpoints, 2 or 3 [3]" in text


def test_both_commands_print_versions_of_library_torch_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a bug report: this library, torch and Python; an option of the script's own stays that."""
    rest = f" {VERSION} (torch {version('torch')}, Python {platform.python_version()})\n"
    main(["--version"])  # it returns: torch's record takes an exit code of 0 for that
    assert capsys.readouterr().out == f"fastckpt-run{rest}"
    with pytest.raises(SystemExit) as end:
        inspect_checkpoints(["--version"], prog_name="fastckpt")
    assert (end.value.code, capsys.readouterr().out) == (0, f"fastckpt{rest}")
    assert parse(["train.py", "--version"])[1].training_script_args == ["--version"]


def test_options_behind_the_script_are_refused_if_they_are_ours_and_reported_if_they_are_torchs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(click.UsageError, match=r"--fast-slots comes after train.py, which would get it"):
        parse(["train.py", "--fast-slots=2"])
    caplog.set_level("WARNING", logger="fastckpt.launcher")
    for arguments in (["--", "--fast-slots", "2"], ["--fast-tokenizer"], ["--role", "x"]):
        assert parse(["train.py", *arguments])[1].training_script_args == [each for each in arguments if each != "--"]
        assert not caplog.text
    assert parse(["train.py", "--max-restarts", "3"])[1].max_restarts == 0
    assert "--max-restarts comes after train.py, which gets it" in caplog.text


def test_the_command_of_the_tools_names_the_launcher() -> None:
    for word in ("run", "launch"):
        with pytest.raises(click.UsageError, match=r"the launcher is fastckpt-run: fastckpt-run x.py"):
            inspect_checkpoints([word, "x.py"], standalone_mode=False)


def test_a_hangup_that_is_ignored_at_the_start_stays_ignored() -> None:
    names = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert _without_ignored(names) == names
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert _without_ignored(names) == "SIGTERM,SIGINT,SIGQUIT"
    finally:
        signal.signal(signal.SIGHUP, before)
