"""Blocks of docs/guides/offload.md: its code trains as without it, and test_job_reports.py has its reports.

``OFFLOAD_PAGE=1`` has the tests write the commands' output into the page.
"""

import os
import re
from pathlib import Path

import torch

from tests.cli.test_docs import alike
from tests.e2e.offload.models import layer, sequence

PAGE = Path(__file__).parents[3] / "docs/guides/offload.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
[CODE] = [text for kind, text in BLOCKS if kind == "python"]
SCRATCH = "/nvme/scratch"


def block(command: str) -> str:
    [found] = [text for kind, text in BLOCKS if kind == "console" and text.startswith(f"$ {command}\n")]
    return found


def assert_as_on_the_page(command: str, text: str, disk: Path) -> None:
    """Compare what a command of the page has printed, before it was filtered, with the page."""
    written, words = block(command), re.findall(r"grep (.*)$", command)[0].replace("-e ", "").split()
    lines = [line.rstrip() for line in text.splitlines() if any(word in line for word in words)]
    now = "\n".join([f"$ {command}", *lines, ""]).replace(str(disk), SCRATCH)
    if "OFFLOAD_PAGE" in os.environ:
        PAGE.write_text(PAGE.read_text().replace(written, now))
    else:
        assert alike(without_times(written)) == alike(without_times(now))


def without_times(text: str) -> str:
    """What took 0.9 s there may take 1100 ms here."""
    return re.sub(r"[\d.e-]+ (ms|s)\b", "0 s", text)


def trained(code: str, printing) -> list[torch.Tensor]:
    """The weights after the code of the page, on a small model."""
    torch.manual_seed(0)
    model, head = torch.nn.Sequential(layer(), layer()), lambda value: value.square().mean()
    names = {
        "loader": [sequence() * turn for turn in (1, 2, 3)],
        "model": lambda batch: head(model(batch)),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-2),
        "print": printing,
    }
    exec(compile(code, str(PAGE), "exec"), names)
    return [weight.detach() for weight in model.parameters()]


def test_the_code_of_the_page_trains_as_without_offloading(tmp_path):
    """Its gradients of earlier steps add up, since a page need not show zero_grad."""
    said: list[object] = []
    code = CODE.replace(SCRATCH, str(tmp_path)).replace('"4GiB"', '"8MiB"')
    assert code.count(str(tmp_path)) == 1 and "8MiB" in code
    offloaded = trained(code, said.append)
    plain = re.sub(r"with offload:.*", "if True:", re.sub(r"^offload = .*|^print.*", "", code, flags=re.MULTILINE))
    assert "offload." not in plain.replace("fastckpt.offload", "")
    assert all(map(torch.equal, offloaded, trained(plain, said.append)))
    [report] = said
    assert report.forwards == 3 and report.written > 30 << 20 and f"offloaded to {tmp_path}" in str(report)
    assert os.listdir(tmp_path) == []
