"""What a training consists of, whatever wraps its model."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastckpt.engine.parts import unwrapped
from tests.engine.test_agreement import in_ranks


def test_a_module_is_found_in_its_wrappers(tmp_path: Path) -> None:
    def job(rank: int) -> list[Any]:
        whole = DistributedDataParallel(nn.Linear(4, 4))
        return [unwrapped(whole) is whole.module, unwrapped(nn.DataParallel(whole.module)) is whole.module]

    assert in_ranks(tmp_path, job) == [[True, True]] * 2
