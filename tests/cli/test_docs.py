"""Blocks of docs/reference/cli.md against the commands' output.

``python -m tests.cli.test_docs`` writes them again into the page's template; then `make docs-reference`.
"""

import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner

from docs_site.command_reference import TEMPLATE
from fastckpt import DdpCheckpointer, StorageType
from fastckpt._core import metrics
from fastckpt._core.memory import slots
from fastckpt._core.report.events import FOLDER
from fastckpt_run.cli import main
from fastckpt_run.watch.http_server import HttpServer, Response
from tests.cli import harm
from tests.support.waits import until

PAGE = Path(__file__).parents[2] / "docs/reference/cli.md"
RECORDED = Path(__file__).with_name("recorded.jsonl")
"""The event log of a job that lost a worker twice."""
_PART = re.compile(r"```console\n(?P<block>.*?)```|<!-- flip (?P<flip>\S+) -->", re.DOTALL)
_DIGEST, _NUMBER = re.compile(r"\b[0-9a-f]{16,32}\b"), re.compile(r"\d+([.:-]\d+)*")


def train(directory: Path) -> DdpCheckpointer:
    """A job that has saved step 300 on storage, and goes on."""
    checkpointer = DdpCheckpointer(directory)
    torch.manual_seed(0)
    embedding = torch.randn(50, 8)
    for step in (100, 200, 300):
        model = {"embedding": embedding, "head": embedding, "norm": torch.ones(8)}
        optimizer = {"state": {0: {"exp_avg": torch.full((50, 8), step / 1e4)}}, "param_groups": [{"lr": 3e-4}]}
        state = {"model": model, "optimizer": optimizer, "step": step}
        metrics = {"loss": {100: 2.5, 200: 2.25, 300: 2.75}[step]}
        checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK, metrics=metrics)
        checkpointer.wait_latest_checkpoint(60)
        embedding = embedding + 0.01
    until(lambda: any(slots.read(slot).digests for slot in newest_slots()), "memory has digests")
    return checkpointer


def leave_log(directory: Path) -> None:
    """Leave the log that an agent on this host would have."""
    (directory / FOLDER).mkdir()
    text = RECORDED.read_text().replace('"host": "node1"', f'"host": "{socket.gethostname()}"')
    (directory / FOLDER / "000001-node1-1176.jsonl").write_text(text)


@contextmanager
def page_of_a_job(directory: Path) -> Iterator[str]:
    """The URL of what an agent has once answered, as the event log of a directory has it."""
    recorded = Path(__file__).with_name("recorded_status.json").read_bytes()
    with closing(HttpServer("0", {("GET", "/status.json"): lambda request: Response(recorded)})) as server:
        (directory / FOLDER).mkdir(parents=True)
        begin = metrics.stamp("job_started") | {"host": socket.gethostname(), "page": server.url}
        (directory / FOLDER / "000001-node1-1.jsonl").write_bytes(metrics.to_line(begin))
        yield server.url


def newest_slots() -> list[Path]:
    found = Path(os.environ["FASTCKPT_SHM_DIR"]).glob("*/slot-*")
    return [slot for slot in found if (slots.read(slot).committed or (0, 0))[1] == 300]


def run(line: str, folder: Path) -> list[str]:
    """Output of a line of a block, with places and names of a host as the page has them."""
    command, _, echo = line.removeprefix("$ ").partition("; ")
    command, _, most = command.partition(" | head -")
    program, *arguments = shlex.split(command)
    assert program == "fastckpt" and echo in ("", "echo $?")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code in ((0, 1, 2) if echo else (0,)), result.output
    shown = result.output.splitlines()
    said = [*shown[: int(most or len(shown))], *([str(result.exit_code)] if echo else [])]
    places = {str(folder): "/data", os.environ["FASTCKPT_SHM_DIR"]: "/dev/shm", socket.gethostname(): "node1"}
    for place, name in places.items():
        said = [text.replace(place, name) for text in said]
    return said


def pages(folder: Path, page: Path = PAGE) -> Iterator[tuple[str, str]]:
    """Each block of a page, and what it is when it is run now."""
    with train(folder / "run"), page_of_a_job(folder / "live"):
        leave_log(folder / "run")
        for part in _PART.finditer(page.read_text()):
            if part["flip"]:
                harm.flip(folder / part["flip"])
                continue
            lines = [line for line in part["block"].splitlines() if line.startswith("$ ")]
            yield (
                part[0],
                "```console\n" + "".join(f"{text}\n" for line in lines for text in (line, *run(line, folder))) + "```",
            )


def alike(block: str) -> list[list[str]]:
    """Words, without what differs from run to run and from machine to machine."""
    return [_NUMBER.sub("0", _DIGEST.sub("x", line)).split() for line in block.splitlines()]


def test_blocks_of_the_cli_page_show_what_the_commands_print(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = list(pages(tmp_path))
    assert len(found) >= 10
    for written, now in found:
        assert alike(written) == alike(now)


def test_every_command_and_key_is_on_the_cli_page():
    from tests.cli.test_output import CHECKPOINT, JOB, KEYS

    text = PAGE.read_text()
    names: list[Any] = [name for keys in KEYS.values() for name in keys]
    assert all(f"`{name}`" in text for name in {*names, *CHECKPOINT, *JOB})
    assert all(f"## fastckpt {command}\n" in text for command in KEYS)
    assert text.count("\n`--json`: ") == len(KEYS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        os.environ["FASTCKPT_SHM_DIR"] = shm
        os.chdir(folder)
        text = TEMPLATE.read_text()
        for written, now in pages(Path(folder), TEMPLATE):
            text = text.replace(written, now, 1)
        TEMPLATE.write_text(text)
        sys.exit()
