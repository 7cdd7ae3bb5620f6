"""`fastckpt doctor`: each class of what it finds, on real file systems, memory, processes and sockets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from fastckpt import DdpCheckpointer, StorageType
from fastckpt_run.doctor import catalogue
from fastckpt_run.doctor.catalogue import examine, name_of
from tests.cli import harm
from tests.cli.conftest import killed_job, publish, quarantine
from tests.support.ports import free_port
from tests.unit._core.memory.conftest import small_disk, small_tmpfs  # noqa: F401 (fixtures)

COMMAND = [sys.executable, "-c", "from fastckpt_run.commands import tools; tools()", "doctor", "--json"]
AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Root that may do only what modes let it."""
ON_A_DEAD_FILE_SYSTEM = """
import ctypes, os, sys
server, libc = os.open("/dev/fuse", os.O_RDWR), ctypes.CDLL(None, use_errno=True)
options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
assert libc.mount(b"dead", sys.argv[1].encode(), b"fuse", 0, options) == 0, os.strerror(ctypes.get_errno())
os.set_inheritable(server, True)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Mounts a file system whose server reads no request, and runs a command beside it."""


def as_root() -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")


def run(*arguments: object, within: list[str] | None = None, **environment: str) -> tuple[int, dict[str, list[Any]]]:
    command = [*(within or []), *COMMAND, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, by_name(json.loads(done.stdout)["lines"])


def by_name(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for line in lines:
        assert (line["state"] == "ok") == (not line["remedy"]), line
        found.setdefault(line["name"], []).append(line)
    return found


def look(check: str, directory: Path | str = "", **settings: str) -> list[dict[str, Any]]:
    return examine(check, directory=str(directory), settings={**os.environ, **settings})


def states(lines: list[dict[str, Any]]) -> list[str]:
    return [line["state"] for line in lines]


def assert_tells(lines: list[dict[str, Any]], state: str, *texts: str) -> None:
    """Check that it is one line, with this state and these texts."""
    [line] = lines
    assert line["state"] == state and all(text in f"{line['found']} -> {line['remedy']}" for text in texts), line


def test_memory_that_is_no_tmpfs_missing_or_not_permitted(tmp_path):
    (tmp_path / "file").touch()
    assert_tells(look("directory", tmp_path / "file"), "problem", "file is a file", "Give a directory")
    assert states(look("writes", tmp_path / "file")) == ["problem"]
    assert_tells(look("resume", tmp_path / "none"), "ok", "a launch starts fresh")
    assert_tells(look("history", tmp_path), "ok", "nobody has saved there")
    assert states(look("shared memory", FASTCKPT_SHM_DIR=str(tmp_path))) == ["warning"]
    missing = look("shared memory", FASTCKPT_SHM_DIR=str(tmp_path / "none"))
    assert_tells(missing, "problem", "No such file", "--fast-shm-dir")
    assert_tells(look("shared memory", FASTCKPT_MEMORY="no"), "problem", "is a tmpfs")


def test_shared_memory_of_docker_in_which_no_checkpoint_fits(directory, small_tmpfs):  # noqa: F811
    publish(directory, 1, state={"model": torch.ones(10 << 20)})  # 40 MiB
    shm = small_tmpfs(64)
    [size] = look("shared memory size", directory)
    assert_tells([size], "warning", "64.0 MiB is what Docker", "--shm-size=", "medium: Memory")
    assert_tells(look("memory needed", directory), "problem", "3 slots of 40")
    subprocess.run(["mount", "-o", "remount,ro", str(shm)], check=True)
    assert_tells(look("directory", shm), "problem", "read-only", "Remount")
    assert_tells(look("file system", shm), "warning", "outlives")


def test_a_full_disk_is_a_problem_that_a_write_has_found(small_disk):  # noqa: F811
    disk = small_disk(8)
    assert states(look("writes", disk)) == ["ok"]
    with (disk / "filler").open("wb") as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
            file.flush()
    assert states(look("space", disk))[0] == "problem"
    assert_tells(look("writes", disk), "problem", "No space left", "Free space")
    (disk / "filler").unlink()


def test_a_directory_that_may_not_be_written_to_and_one_of_another_user(directory):
    as_root()
    directory.mkdir(mode=0o555)
    code, lines = run(directory, within=AS_OTHERS)
    assert_tells(lines["directory"], "problem", "user 0 may not write there (owner 0, mode 0555)")
    assert code == 1 and states(lines["writes"]) == states(lines["names"]) == ["problem"]
    for owner, mode, told in ((65534, 0o755, ("belongs to user 65534", "chown")), (os.getuid(), 0o777, ("chmod o-w",))):
        os.chown(directory, owner, owner)
        directory.chmod(mode)
        assert_tells(look("directory", directory), "warning", *told)


def test_a_dead_file_system_is_given_up_and_the_rest_is_checked(tmp_path):
    as_root()
    dead = tmp_path / "dead"
    dead.mkdir()
    within = ["unshare", "--mount", sys.executable, "-c", ON_A_DEAD_FILE_SYSTEM, str(dead)]
    code, lines = run(dead / "run", "--deadline", 4, within=within)
    given_up = ("not done after 4 s: it hangs", "not looked at: file system, space, writes")
    assert_tells(lines["directory"], "problem", *given_up)
    assert code == 1 and lines.keys().isdisjoint({"writes", "memory of others"})
    assert states(lines["Python"]) == states(lines["interfaces"]) == ["ok"]


def test_who_holds_a_directory_is_named_with_what_a_launch_would_do(directory):
    with DdpCheckpointer(directory) as checkpointer:
        checkpointer.save_checkpoint(2, {"w": torch.ones(2)}, storage_type=StorageType.DISK)
        checkpointer.wait_latest_checkpoint(60)
        holder = (f"process {os.getpid()} on", "a launch waits", "--fast-take-over")
        for check in ("arena of directory", "history"):
            assert_tells(look(check, directory), "warning", *holder)
        assert look("resume", directory)[0]["found"].startswith("step 2 of history 1 from memory")
        history = look("history", directory, FASTCKPT_TAKE_OVER="yes")
        assert_tells(history, "warning", "takes the directory over")


def test_memory_that_a_killed_agent_left_is_adopted_by_its_directory_alone(fastckpt, directory, tmp_path):
    pids = tmp_path / "pids"

    def leave_a_process() -> None:
        os.setsid()
        pids.write_text(str(subprocess.Popen(["sleep", "600"]).pid))

    killed_job(directory, leave_a_process)
    line, left = look("arena of directory", directory)
    os.kill(int(pids.read_text()), signal.SIGKILL)
    assert_tells([left], "warning", "a launch kills them", pids.read_text())
    assert_tells([line], "ok", "step 2 of history 1 whole: a launch adopts it")
    assert "which is dead" in look("history", directory)[0]["found"]
    assert look("resume", directory)[0]["found"].startswith("step 2 of history 1 from memory")
    _, others = look("memory of others", tmp_path / "another")
    assert_tells([others], "warning", str(directory), "fastckpt shm clean")
    harm.lose(directory)
    directory.mkdir()
    assert_tells(look("arena of directory", directory), "warning", "removed since")
    [arena] = Path(os.environ["FASTCKPT_SHM_DIR"]).iterdir()
    harm.lose(arena)
    arena.touch()
    assert_tells(look("arena of directory", directory), "problem", str(arena))
    arena.unlink()
    assert states(look("arena of directory", directory)) == ["ok"]
    assert fastckpt("shm", "clean", "--yes").code == 0  # what the job has shown of its progress


def test_a_sound_directory_is_left_as_it_was_and_bad_checkpoints_have_reasons(fastckpt, three):
    """The command is that of docs/operate/doctor.md."""
    text = (Path(__file__).parents[2] / "docs/operate/doctor.md").read_text()
    command = re.search(r"^fastckpt (doctor .*)$", text, re.MULTILINE)
    places = {"/data/run": str(three), "node1": "localhost", "node2": "127.0.0.1"}
    arguments = re.sub("|".join(places), lambda match: places[match[0]], command[1]).split()
    before = sorted(map(str, three.rglob("*")))
    said = fastckpt(*arguments, "--json")
    lines = by_name(said.document["lines"])
    assert said.code == 0 and said.document["state"] in ("ok", "warning") and "endpoint localhost:29400" in lines
    assert sorted(map(str, three.rglob("*"))) == before
    assert lines["resume"][0]["found"].startswith("step 30 of history 1 from storage")
    assert "step 20 in storage, step 10 in storage" in lines["resume"][1]["found"]
    assert "became durable" in lines["writes"][0]["found"] and states(lines["locks"]) == ["ok"]
    harm.truncate(three / "checkpoint-30/model.pt")
    found = look("resume", three)
    assert states(found) == ["ok", "warning", "ok"] and "damaged" in found[1]["found"]
    for step in (10, 20):
        quarantine(three, step)
    assert_tells(look("resume", three)[:1], "problem", "fastckpt which")


def test_endpoints_and_interfaces_that_are_wrong_or_not_there(monkeypatch):
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        taken = f"127.0.0.1:{listening.getsockname()[1]}"
        endpoints = f"nosuch.invalid:29400,{taken},localhost:{port}"
        lines = by_name(examine("endpoints", endpoints=endpoints, settings={}))
    found = {name.removeprefix("endpoint "): told[0]["found"] for name, told in lines.items()}
    assert "no such name" in found["nosuch.invalid:29400"] and "would hold the store" in found[f"localhost:{port}"]
    assert "this host" in found[taken] and "something listens" in found[taken]
    assert_tells(examine("secret", endpoints=endpoints, settings={}), "warning", "openssl rand")
    assert_tells(examine("endpoints", endpoints="a:1,,b:2", settings={}), "problem", "has an empty one")
    for gloo, nccl, found in (("nosuch0", "=lo", {"ok", "problem"}), ("lo", "^docker,nosuch", {"ok"})):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", gloo)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
        lines = look("interfaces")
        assert {*states(lines)} == found
        bad = [line["found"] for line in lines if line["state"] != "ok"]
        assert len(bad) == len(found) - 1 and all("no interface is named nosuch0" in each for each in bad)


def test_a_store_is_listed_and_written_to_and_secrets_are_in_no_line(tmp_path, monkeypatch, fastckpt):
    far = f"memory://{tmp_path.name}/run"
    lines = look("store", far)
    assert states(lines)[:2] == ["ok", "ok"] and "0 whole checkpoints" in lines[0]["found"]
    assert not [key for key in fsspec.filesystem("memory").find(far) if "doctor" in key]
    [line] = look("store", "nosuch://nowhere/run")
    assert line["state"] == "problem" and line["remedy"]
    secret, file = "a-secret-of-this-job-0123456789", tmp_path / "secret"
    file.write_text(secret)
    assert_tells(look("secret", FASTCKPT_SECRET_FILE=str(file)), "problem", "chmod 600")
    file.chmod(0o600)
    assert states(look("secret", FASTCKPT_SECRET_FILE=str(file))) == ["ok"]
    monkeypatch.setenv("FASTCKPT_SECRET", secret)
    said = fastckpt("doctor", f"nosuch://user:{secret}@host/run?sig={secret}")
    assert said.code == 1 and secret not in said.out + said.err and "nosuch" in said.out


def test_an_error_in_a_check_is_a_line_and_so_is_the_repair_of_a_package_that_is_too_old(tmp_path, monkeypatch):
    [line] = examine("shared memory", settings={"FASTCKPT_SLOTS": "many"})
    assert line["state"] == "problem" and "FASTCKPT_SLOTS is 'many'" in line["found"]

    def broken(_: object) -> Iterator[Any]:
        raise ZeroDivisionError("by nothing")
        yield

    assert len({name_of(check) for check in catalogue.ALL}) == len(catalogue.ALL)
    monkeypatch.setitem(catalogue._BY_NAME, "clock", broken)
    [line] = examine("clock", settings={})
    assert line["state"] == "problem" and "ZeroDivisionError: by nothing" in line["found"]

    for name, version in (("psutil", "1.0"), ("torch", "2.5.1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = look("packages")
    assert states(lines) == ["problem", "problem"]
    for name in ("psutil", "torch"):
        assert any(line["remedy"].startswith(f"pip install '{name}") for line in lines)


def test_limits_of_cgroups_of_both_versions_are_found_and_fewer_cores_than_ranks(tmp_path, monkeypatch):
    from fastckpt._core.memory import headroom

    monkeypatch.setattr(headroom, "CGROUPS", tmp_path)
    read_text, member = Path.read_text, "0::/a/b\n"

    def fake(self: Path, *args: Any, **kwargs: Any) -> str:
        return member if str(self) == "/proc/self/cgroup" else read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", fake)
    files = {
        "a/pids.max": "max", "a/b/memory.max": 1 << 30, "a/b/memory.current": 1020 << 20, "a/b/memory.high": 512 << 20,
        "a/b/cpu.max": "50000 100000", "a/b/pids.max": 100, "a/b/pids.current": 90,
        "memory/c/memory.limit_in_bytes": 1 << 30, "memory/c/memory.usage_in_bytes": 1 << 20,
        "cpu/c/cpu.cfs_quota_us": -1, "cpu/c/cpu.cfs_period_us": 100000,
        "pids/c/pids.max": 1000, "pids/c/pids.current": 10,
    }  # fmt: skip
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    assert states(look("cgroup memory")) == ["warning", "warning"] and states(look("cgroup processor")) == ["warning"]
    assert states(look("cgroup processes")) == ["problem"]
    member = "4:memory:/c\n2:cpu,cpuacct:/c\n8:pids:/c\n"
    [line] = look("cgroup memory")
    assert line["state"] == "ok" and "counts" in line["found"] and "1023.0 MiB free of 1.0 GiB" in line["found"]
    assert states(look("cgroup processor")) == ["ok"] and states(look("cgroup processes")) == ["warning"]
    usable = len(os.sched_getaffinity(0))
    assert states(examine("cores", ranks=usable)) == ["ok"]
    assert_tells(examine("cores", ranks=usable + 1), "warning", "--cpus-per-task")
