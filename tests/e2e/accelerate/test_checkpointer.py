"""One process with accelerate: refused calls, files of a checkpoint, and directories of stock accelerate."""

import copy
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from fastckpt.accelerate import AccelerateCheckpointer, StorageType
from fastckpt.errors import BadCheckpoint, ConfigError
from tests.e2e.accelerate.training import Training, advance
from tests.faults.diary import digest

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def fresh_accelerator_state():
    """accelerate keeps its state for the whole process: this forgets it."""

    def forget():
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()

    yield forget
    forget()


def go(training: Training, steps: int) -> None:
    for inputs, targets in training.loader:
        if training.count.steps == steps:
            return
        advance(training, inputs, targets)


def test_states_load_from_memory_storage_and_directories_of_stock_accelerate(tmp_path):
    training = Training()
    with AccelerateCheckpointer(training.accelerator, tmp_path / "run") as checkpointer:
        assert checkpointer.load_state() == 0
        for step, place in ((3, StorageType.DISK), (5, StorageType.MEMORY)):
            go(training, step)
            assert checkpointer.save_state(step, place, name=f"step_{step}")
        weight = training.model[0].weight.clone()
        checkpointer.wait_latest_checkpoint()
        go(training, 6)
        assert checkpointer.load_state() == 5 and checkpointer.loaded_from == "memory"
        assert torch.equal(training.model[0].weight, weight) and training.count.steps == 5
        assert checkpointer.load_state(tmp_path / "run/step_3") == 3 and training.count.steps == 3
        training.accelerator.save_state(str(tmp_path / "run/stock"))
        go(training, 7)
        assert checkpointer.load_state(tmp_path / "run/stock") == -1 and training.count.steps == 3
        with pytest.raises(BadCheckpoint):
            checkpointer.load_state(tmp_path / "run/nothing")
    stock, ours = ({path.name for path in (tmp_path / "run" / name).iterdir()} for name in ("stock", "step_3"))
    assert ours == stock | {"manifest.json", "epochs.json"}


def test_a_save_in_the_middle_of_an_accumulation_is_warned_of_once(tmp_path, caplog):
    """accelerate saves no gradients either."""
    training = Training()
    training.accelerator.gradient_accumulation_steps = 3
    with AccelerateCheckpointer(training.accelerator, tmp_path / "run") as checkpointer:
        checkpointer.load_state()
        for step, (inputs, targets) in zip((1, 2, 3, 4), training.loader, strict=False):
            with training.accelerator.accumulate(training.model):
                advance(training, inputs, targets)
            checkpointer.save_state(step, StorageType.MEMORY)
    warned = [text for text in caplog.messages if "in the middle of an accumulation of 3 batches" in text]
    assert [text[:6] for text in warned] == ["step 1"]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loop_whose_loader_counts_epochs_resumes_in_the_same_order(
    tmp_path, caplog, fresh_accelerator_state, stateful
):
    """That of accelerate's own examples, twice begun again within an epoch; the order of later ones is as well."""

    def used(folder: Path, *ends: int) -> list[str]:
        found = list[str]()
        for end in ends:
            fresh_accelerator_state()
            training = Training(stateful=stateful)
            loader, accelerator = training.loader, training.accelerator
            with AccelerateCheckpointer(accelerator, folder) as checkpointer:
                assert checkpointer.load_state() == len(found)
                while len(found) < end:
                    skip = 0 if stateful else len(found) % len(loader)
                    for inputs, targets in accelerator.skip_first_batches(loader, skip) if skip else loader:
                        advance(training, inputs, targets)
                        found.append(digest(inputs))
                        if len(found) % 10 == 0:
                            checkpointer.save_state(len(found), StorageType.MEMORY)
                        if len(found) == end:
                            break
        return found

    whole = used(tmp_path / "whole", 70)
    assert len({*whole}) == 70, "each epoch has its own order"
    assert used(tmp_path / "parts", 30, 40, 70) == whole
    assert "no epochs of data loaders" not in caplog.text


def test_several_models_are_saved_under_the_names_of_accelerate(tmp_path):
    """Each has its files, under the names that accelerate counts."""
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(4, size) for size in (4, 2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    accelerator.prepare(*models, *optimizers)
    with AccelerateCheckpointer(accelerator, tmp_path / "run") as checkpointer:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        states = [copy.deepcopy(part.state_dict()) for part in (*models, *optimizers)]
        assert checkpointer.save_state(1, StorageType.DISK)
        checkpointer.wait_latest_checkpoint()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            assert model.weight.ne(states[models.index(model)]["weight"]).any()
        assert checkpointer.load_state() == 1
        for part, state in zip((*models, *optimizers), states, strict=True):
            assert digest(part.state_dict()) == digest(state)
    accelerator.save_state(str(tmp_path / "stock"))
    stock, ours = (
        {path.name for path in place.iterdir()} for place in (tmp_path / "stock", tmp_path / "run/checkpoint-1")
    )
    assert {"model_1.safetensors", "optimizer_1.bin"} <= stock and ours == stock | {"manifest.json", "epochs.json"}


def test_files_written_by_hooks_are_part_of_the_checkpoint(tmp_path):
    training = Training(hooks=True)
    with AccelerateCheckpointer(training.accelerator, tmp_path) as checkpointer:
        go(training, 2)
        assert checkpointer.save_state(2, StorageType.DISK)
        weight = training.model[0].weight.clone()
        go(training, 3)
        assert checkpointer.load_state() == 2
        assert torch.equal(training.model[0].weight, weight)
    assert not (tmp_path / "checkpoint-2/model.safetensors").exists()
    assert torch.equal(torch.load(tmp_path / "checkpoint-2/adapter.bin")["0.weight"], weight)


def test_unsupported_calls_of_accelerate_are_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    with (
        AccelerateCheckpointer(accelerator, tmp_path) as checkpointer,
        pytest.raises(ConfigError, match="no optimizer"),
    ):
        checkpointer.save_state(1)
    training = Training()
    checkpointer = AccelerateCheckpointer(training.accelerator, tmp_path)
    with checkpointer, pytest.raises(ConfigError, match="cannot be called"):
        checkpointer.save_state(1, name="a/b")
    for kind, says in (("FSDP", "distributed by FSDP"), ("DEEPSPEED", "fastckpt.deepspeed")):
        AcceleratorState._shared_state["distributed_type"] = kind
        with pytest.raises(ConfigError, match=says):
            AccelerateCheckpointer(training.accelerator, Path(tmp_path))
