"""Arguments of ActivationOffload are checked: errors name value, limit and remedy; and its report."""

import os

import pytest
import torch

from fastckpt.errors import ConfigError, FastckptError
from fastckpt.offload import ActivationOffload
from tests.e2e.offload.losses import leaf, settled, some_loss
from tests.support.offload_budget import budget_is_kept  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budget": "4 pounds"}, "is '4 pounds'; give bytes, or a text such as '4GiB', 4 MiB or more, or 'auto'"),
        ({"budget": "Auto"}, "did you mean 'auto'?"),
        ({"budget": 2.5}, "budget is 2.5; give bytes"),
        ({"budget": True}, "budget is True; give bytes"),
        ({"budget": 4}, "budget is 4 bytes, less than 4.0 MiB, of which a quarter may be on the way out; give bytes"),
        ({"consistency": "none"}, "consistency is 'none'; give 'check' or 'copy'"),
        ({"half": "fp16"}, "half is 'fp16'; it is to be True or False: half=True"),
        ({"return_memory": 1}, "return_memory is 1; it is to be True or False"),
        ({"buget": "1GiB"}, "budget"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(tmp_path, arguments, text):
    with pytest.raises(ConfigError) as error:
        ActivationOffload(tmp_path, **arguments)
    assert text in str(error.value)


def test_a_directory_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for given, text in (
        (tmp_path / "file", "is not a directory; make it on a local SSD"),
        (tmp_path / "none", "does not exist; make it on a local SSD"),
        (7, "directory is 7; give an"),
        ("", "directory is ''; give"),
        ("s3://b/x", "a URL, and activ"),
        ("/proc", "where no file can be made"),
    ):
        with pytest.raises(ConfigError, match=text):
            ActivationOffload(given)


def step(offload, value):
    with offload:
        loss = value.relu().square().sum()
    settled(offload)
    loss.backward()


def test_floats_are_halved_only_on_demand_and_the_report_says_so(tmp_path):
    plain, mine = (torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    (plain.requires_grad_() ** 2).sum().backward()
    offload = ActivationOffload(tmp_path, budget="4MiB", half=True)
    with offload:
        value = mine.requires_grad_() * 1
        loss = (value**2).sum()
    step(offload, torch.randn(512, 512, requires_grad=True))  # until all is written
    loss.backward()
    assert not torch.equal(mine.grad, plain.grad)
    assert torch.equal(mine.grad, 2 * plain.detach().half().float())
    assert "stored in 16" in str(offload.report())
    assert offload.report().written <= 2 * 512 * 512 * 2 + 512 * 512 * 2 * 2


def test_automatic_budgets_come_from_the_profile_of_the_first_step(tmp_path):
    offload = ActivationOffload(tmp_path)
    for _ in range(3):
        with offload:
            loss = some_loss(leaf(), 16)
        loss.backward()
    report = offload.report()
    assert 4 << 20 <= report.budget <= 48 << 20, "at least four times the largest tensor, at most all"
    assert report.wait.planned is not None


def test_a_forked_process_is_told_that_the_report_is_its_parents(tmp_path):
    """A thread that writes may have held a lock at the fork, which nobody releases in the child."""
    offload = ActivationOffload(tmp_path, budget="4MiB")
    step(offload, torch.randn(6, 512, 512, requires_grad=True))
    with offload._offloader._store.transfers.written._lock:
        child = os.fork()
        if not child:
            try:
                offload.report()
            except FastckptError as error:
                os._exit(0 if "asked for its report" in str(error) and str(os.getppid()) in str(error) else 1)
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert offload.report().forwards == 1
