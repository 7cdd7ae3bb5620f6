"""On a GPU the same promises hold; run with `pytest -m gpu` where there is one."""

from pathlib import Path

import pytest
import torch

from fastckpt import DdpCheckpointer

pytestmark = pytest.mark.gpu


def test_a_state_on_a_gpu_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with DdpCheckpointer(tmp_path) as checkpointer:
        for step in range(5):
            model(torch.randn(8, 512, device="cuda")).sum().backward()
            optimizer.step()
            assert checkpointer.save_checkpoint(step, {"m": model.state_dict(), "o": optimizer.state_dict()})
        weights = [parameter.clone() for parameter in model.parameters()]
        numbers = torch.randn(9, device="cuda")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = checkpointer.load_checkpoint()
        model.load_state_dict(state["m"])
        optimizer.load_state_dict(state["o"])
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(numbers, torch.randn(9, device="cuda"))
