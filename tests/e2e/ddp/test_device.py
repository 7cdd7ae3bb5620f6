"""Saves of tensors on an accelerator, with the same guarantees; run with `pytest -m gpu` where there is one."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from fastckpt import StorageType
from fastckpt._core.transfer import device_copy as device_module
from fastckpt._core.transfer.device_copy import DeviceCopy, Lane
from tests.e2e.ddp import overlapping
from tests.e2e.ddp.conftest import Ranks
from tests.e2e.ddp.overlapping import in_memory
from tests.unit._core.format.baking import assert_same, reference

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None and torch.accelerator.is_available(), "pytest -m gpu needs an accelerator"
    return torch.device(found.type, 0)


def busy(device: torch.device) -> None:
    """Give the training's stream so much to do that the host is far ahead of it."""
    matrix = torch.ones(512, 512, device=device)
    for _ in range(20):
        matrix = matrix @ matrix / 512


def net(device: torch.device, width: int = 256) -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    ).to(device)


class Training(overlapping.Training):
    """A model on a device, whose saves overlap with the steps of its optimizer."""

    def __init__(
        self, ranks: Ranks, device: torch.device, make: Any = torch.optim.AdamW, model: Any = None, **options: Any
    ) -> None:
        super().__init__(ranks, make, net(device) if model is None else model, **options)
        self.device = device
        self.halves = [self.model] if model is None else [*self.model]

    def learn(self) -> None:
        self.optimizer.zero_grad()
        for half in self.halves:
            half(torch.ones(16, 64, device=next(half.parameters()).device)).square().sum().backward()
        self.optimizer.step()

    def saved(self, *steps: int) -> "Training":
        for step in steps:
            self.learn()
            self.save(step)
        return self

    def save_2_and_copy_it(self) -> None:
        assert self.save(2).pending
        self.learn()
        self.one._writer.overlap.wait()

    def holds_its_steps(self, learn: Callable[[], None] | None = None) -> None:
        """What changes at once after a save is saved as it was."""
        for step in range(4):
            (learn or self.learn)()
            wanted = reference(self.state())
            busy(self.device)
            assert self.save(step)
            for half in self.halves:
                half[1].running_mean.add_(1)
        assert_same(self.one.load_checkpoint(), wanted)


class TestTransfer:
    SIZES = (5, 1000, 3_000_000, 1 << 20, 77)

    @pytest.mark.parametrize("staging", [1 << 16, 8 << 20])
    @pytest.mark.parametrize("pinned", [False, True])
    def test_a_device_copy_holds_the_values_at_its_start_while_training_continues(
        self, device, monkeypatch, *, staging, pinned
    ):
        monkeypatch.setattr(device_module, "STAGING", staging)
        still = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in self.SIZES]
        moving = [torch.randn(4000), torch.randn(10)]
        on_device, changing = [each.to(device) for each in still], [each.to(device) for each in moving]
        total = sum(each.nbytes for each in still + moving)
        memory = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        copies, offset = [], memory.data_ptr()
        for each in on_device + changing:
            copies.append((offset, each.untyped_storage(), each.nbytes))
            offset += each.nbytes
        busy(device)
        with closing(DeviceCopy(Lane(device), copies[:5], copies[5:])) as transfer:
            for each in changing:
                each.add_(1)
            thread = threading.Thread(target=lambda: (transfer.begin(), transfer.finish()))
            thread.start()
            transfer.hold()
            for each in on_device:
                each.add_(3)
            thread.join()
        torch.accelerator.synchronize(device)
        assert bytes(memory.numpy()) == b"".join(each.numpy().tobytes() for each in still + moving)

    def test_a_mapped_file_is_pinned_where_the_device_supports_it(self, device):
        if device.type != "cuda":
            pytest.skip("only CUDA registers memory that others mapped")
        from fastckpt._core.transfer.image import pin, unpin

        mapped = mmap.mmap(-1, 1 << 20)
        anchor = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(anchor)
        view = torch.frombuffer(mapped, dtype=torch.uint8)
        assert pin(address, len(mapped), device) and view.is_pinned()
        assert not pin(address, len(mapped), device)  # twice is an error, which later launches must not report
        torch.ones(1, device=device)
        unpin(address, device)
        assert not view.is_pinned()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "capturable": lambda parameters: torch.optim.AdamW(parameters, capturable=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


NO_MEMORY: dict[str, Any] = {"_stage": torch.OutOfMemoryError("no memory for that"), "room": NotImplementedError()}
"""What raises there is a function of the copy."""


class TestSaves:
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_an_overlapped_device_save_holds_the_state_of_its_step(self, ranks, device, name, overlaps):
        if name in ("fused", "capturable") and device.type != "cuda":
            pytest.skip("CUDA only")
        training = Training(ranks, device, OPTIMIZERS[name], overlaps=overlaps)
        average = torch.optim.swa_utils.AveragedModel(training.model)
        wanted: Any = None
        for step in range(6):
            training.learn()
            average.update_parameters(training.model)
            if step:
                training.one._writer.overlap.wait()
                assert_same(in_memory(training.one), (step - 1, wanted))
            state = training.state() | {"average": average.state_dict()}
            wanted = reference(state)
            busy(device)
            result = training.one.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
            assert (result.saved, result.pending, result.trouble) == (True, overlaps and step > 0, "")
            average.update_parameters(training.model)  # moves at once
        assert_same(training.one.load_checkpoint(), wanted)

    @pytest.mark.parametrize("name", NO_MEMORY)
    def test_without_device_memory_for_staging_the_state_is_copied_at_once(self, ranks, device, monkeypatch, name):
        def fail(given: Any) -> Any:
            if given:
                raise NO_MEMORY[name]
            return []

        monkeypatch.setattr(device_module, name, fail)
        Training(ranks, device).holds_its_steps()

    def test_a_save_in_another_stream_and_under_a_default_device_holds_the_state_of_its_step(self, ranks, device):
        torch.set_default_device(device)  # which moves none of our own tensors
        try:
            training, stream = Training(ranks, device), torch.Stream(device)

            def learn() -> None:
                with stream:
                    training.learn()
                stream.synchronize()

            training.holds_its_steps(learn)
            assert device_module.host_buffer(8).device.type == "cpu"
        finally:
            torch.set_default_device(None)

    @pytest.mark.parametrize("call", [1, 2])
    def test_a_device_copy_that_fails_is_reported_and_does_not_end_training(self, ranks, device, monkeypatch, call):
        training = Training(ranks, device).saved(0, 1)
        training.learn()
        send, calls = Lane.send, iter(range(1, 9))

        def fail(self: Lane, pieces: Any) -> None:
            send(self, pieces)
            if next(calls) == call:
                raise RuntimeError("the device says no")

        with monkeypatch.context() as patch:
            patch.setattr(Lane, "send", fail)
            training.save_2_and_copy_it()
        result = training.save(3)
        assert result.saved and "the device says no" in result.trouble and result.skipped == 1
        assert_same(training.one.load_checkpoint(), reference(training.state()))

    def test_random_numbers_of_every_device_continue_after_a_resume(self, ranks, device):
        devices = [torch.device(device.type, index) for index in range(torch.accelerator.device_count())]
        (one,) = ranks.start()
        one.save_checkpoint(1, {"weight": torch.ones(3, device=device)}, storage_type=StorageType.MEMORY)
        wanted = [torch.rand(5, device=each).tolist() for each in devices]
        one.load_checkpoint()
        assert [torch.rand(5, device=each).tolist() for each in devices] == wanted

    def test_a_model_on_two_devices_is_saved_with_overlap(self, ranks, device):
        if torch.accelerator.device_count() < 2:
            pytest.skip("there is one device")
        halves = torch.nn.ModuleList([net(device), net(torch.device(device.type, 1))])
        Training(ranks, device, model=halves).holds_its_steps()

    def test_a_swap_on_a_device_undone_before_the_copy_ends_is_detected(self, ranks, device, monkeypatch):
        """By way of .data: neither versions nor the bytes on the device afterwards show it."""
        training = Training(ranks, device).saved(0, 1)
        training.learn()
        parameters = list(training.model.parameters())
        begin, before = DeviceCopy.begin, [each.data.clone() for each in parameters]

        def swapped(self: DeviceCopy) -> None:
            with self._lane.current() as stream:
                stream.wait_event(self._ready)
                for each in parameters:
                    each.data.fill_(7.0)
            begin(self)
            with self._lane.current():
                for each, kept in zip(parameters, before, strict=True):
                    each.data.copy_(kept)

        with monkeypatch.context() as patch:
            patch.setattr(DeviceCopy, "begin", swapped)
            training.save_2_and_copy_it()
        torch.accelerator.synchronize(device)
        assert in_memory(training.one)[0] == 1
        wanted = reference(training.state())
        result = training.save(3)
        assert (result.saved, result.pending, result.skipped) == (True, False, 1)
        assert "was written to while it was copied" in result.trouble
        assert_same(training.one.load_checkpoint(), wanted)

    def test_a_direct_copy_into_pinned_memory_does_not_block_the_host(self, ranks, device):
        """The step of the optimizer is launched while the copy has not even begun."""
        if device.type != "cuda":
            pytest.skip("only CUDA pins what is mapped")
        training = Training(ranks, device).saved(0, 1, 2)
        training.learn()
        wanted = reference(training.state())
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]
        training.save(3)
        training.learn()
        pending = training.one._writer.overlap._pending
        assert pending is not None and not pending[1].done()
        assert_same(training.one.load_checkpoint(), wanted)
