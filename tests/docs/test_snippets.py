"""Each block of the documentation is run, or says which test runs it, or why none does.

Blocks of a page run in their order, in one directory and one process (`page_process`), which is forked from one that
has imported torch; that of pages without commands is the same. Commands are executed by bash, with those of this
checkout on PATH. Above a block may stand
``<!-- runs in: tests/... -->`` or ``<!-- not run: reason -->``.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import KINDS, ROOT, SHELL, blocks_of, kinds_of
from tests.support import launchers

COMMANDS = {
    "fastckpt-run": "from fastckpt_run.commands import launch; launch()",
    "fastckpt": "from fastckpt_run.commands import tools; tools()",
    "torchrun": "from torch.distributed.run import main; main()",
}
NOT_YET = {
    "docs/guides/dcp.md",
    "docs/guides/deepspeed.md",
    "docs/guides/huggingface.md",
    "docs/operate/hangs.md",
    "docs/operate/watch.md",
    "docs/reference/format.md",
    "docs/reference/metrics.md",
    "docs/reference/versions.md",
}
"""Pages that are from before the documentation was sorted by task; only to be made shorter."""
ELSEWHERE = {
    "docs/guides/offload.md": "tests/e2e/offload/test_page.py",
    "docs/reference/api.md": "tests/docs/test_reference.py",
    "docs/reference/cli.md": "tests/cli/test_docs.py",
}
"""Pages that tests of their own run, or generate, as a whole."""
REASONS = {
    "installs packages",
    "needs a Docker daemon",
    "needs a cluster",
    "needs several hosts",
    "needs GPUs",
    "of another library, which is not installed here",
    "stands for a script of yours",
}
"""Why a block may be run by no test."""
ALL = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in ALL if page not in NOT_YET and page not in ELSEWHERE]
MANY_JOBS = {
    "docs/clusters/nodes.md",
    "docs/guides/changed_script.md",
    "docs/guides/fsdp.md",
    "docs/guides/going_back.md",
    "docs/guides/other_gpu_count.md",
}
"""Pages whose commands launch so many jobs that they are a campaign."""
KINDS_RUN = {page: {each.kind for each in blocks_of(page) if not (each.runs_in or each.not_run)} for page in PAGES}
WITH_COMMANDS = [page for page, kinds in KINDS_RUN.items() if kinds & {*SHELL}]
RUN = [
    [page for page, kinds in KINDS_RUN.items() if kinds and page not in WITH_COMMANDS],
    *([p] for p in WITH_COMMANDS),
]


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Commands of this checkout, as an installation would have them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, code in COMMANDS.items():
        (folder / name).write_text(f"#!{sys.executable}\n{code}\n")
    (folder / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for each in folder.iterdir():
        each.chmod(0o755)
    return folder


def run(pages: list[str], folder: Path, bin_folder: Path) -> tuple[int, str]:
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "FASTCKPT_PRELOAD": "auto"}
    environment["PET_LOG_DIR"] = str(folder / "logs")  # else a temporary directory that nobody removes
    log = folder / "log"
    with log.open("wb") as output:
        arguments = ["-m", "tests.docs.page_process", str(folder / "pages"), *pages]
        process = launchers.start(arguments, environment, output.fileno())
    return process.wait(280), log.read_text(errors="replace")


@pytest.mark.parametrize(
    "pages", [pytest.param(each, marks=[pytest.mark.campaign] * (each[0] in MANY_JOBS), id=each[0]) for each in RUN]
)
def test_the_blocks_of_a_page_run(pages: list[str], tmp_path: Path, bin_folder: Path, forked_launchers: None):
    code, printed = run(pages, tmp_path, bin_folder)
    assert code == 0, printed[-8000:]


def test_blocks_that_are_not_run_are_few_and_have_a_reason():
    for page in PAGES:
        assert not kinds_of(page) - KINDS, f"{page}: a block of another kind would be run by nobody"
        for block in blocks_of(page):
            assert not block.not_run or block.not_run in REASONS, f"{block.place}: {block.not_run}"
            if block.runs_in:
                assert Path(page).name in (ROOT / block.runs_in).read_text(), f"{block.runs_in} does not name the page"
