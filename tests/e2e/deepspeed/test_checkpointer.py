"""DeepSpeedCheckpointer with engines in this process: saves, loads and refusals."""

import pickle
from typing import Any

import pytest
import torch

from fastckpt import Checkpointer
from fastckpt.deepspeed import DeepSpeedCheckpointer, StorageType, files_of, reads
from fastckpt.deepspeed.topology import NAME
from fastckpt.errors import BadCheckpoint, ConfigError, FastckptError
from tests.e2e.ddp.conftest import flip
from tests.e2e.deepspeed.engines import config, engine_of, small, train
from tests.e2e.deepspeed.test_stock import assert_same_files

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("process_group")]

MEMORY = StorageType.MEMORY
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_FP32 = BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}
OTHERS = [(0, {}), (0, BF16), (1, {}), (1, BF16), (1, BF16_FP32), (2, {}), (3, {})]
KINDS: list[Any] = [(2, BF16), (3, BF16), *(pytest.param(*kind, marks=pytest.mark.campaign) for kind in OTHERS)]


def test_deepspeed_tags_name_checkpoints_and_latest_follows(directory):
    """Two of one step, one again for a later step; ``latest`` names what was to be the latest, once it is durable."""
    engine = engine_of(small(), config(2))
    with DeepSpeedCheckpointer(engine, directory) as one:
        assert one.load_checkpoint(directory) == (None, None)
        train(engine)
        assert one.save_checkpoint(directory, "first", {"epoch": 1})
        assert one.save_checkpoint(directory, "same", {"epoch": 2})
        one.wait_latest_checkpoint()
        assert (directory / "latest").read_text() == "same"
        assert '"zero_stage": 2' in (directory / "same" / NAME).read_text()
        train(engine)
        assert one.save_checkpoint(directory, "first", {"epoch": 3}, save_latest=False)
        one.wait_latest_checkpoint()
        assert (directory / "latest").read_text() == "same"
        loss = train(engine)
        assert one.save_checkpoint(directory, storage_type=MEMORY)
        assert not (directory / "global_step3").exists()
        expected = train(engine)
        for tag, epoch, step in [("first", 3, 2), ("same", 2, 1)]:
            path, client = one.load_checkpoint(directory, tag)
            assert path == f"{directory}/{tag}/mp_rank_00_model_states.pt"
            assert (client["epoch"], engine.global_steps, one.loaded_step) == (epoch, step, step)
        _, client = one.load_checkpoint(directory)
        assert (engine.global_steps, one.loaded_step, one.loaded_from) == (3, 3, "memory")
        assert train(engine) == expected != loss, "with the very dropout"
        with pytest.raises(BadCheckpoint, match="holds no checkpoint third"):
            one.load_checkpoint(directory, "third")
    with pytest.raises(FastckptError, match="the checkpointer is closed"):
        one.save_checkpoint(directory)


def test_an_engine_whose_state_cannot_be_saved_raises_and_disturbs_no_other(directory):
    """It raises; what was saved before stays, DeepSpeed saves as ever, and so does the next save."""
    engines = [engine_of(small(), config(1)) for _ in range(2)]
    places = [directory / name for name in ("first", "second")]
    one, other = (DeepSpeedCheckpointer(*each) for each in zip(engines, places, strict=True))
    with one, other:
        for engine, place, checkpointer in zip(engines, places, (one, other), strict=True):
            train(engine)
            assert checkpointer.save_checkpoint(place, storage_type=MEMORY)
            train(engine)
            own = engine.checkpoint_engine
            with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
                checkpointer.save_checkpoint(place, client_state={"code": lambda: 0}, storage_type=MEMORY)
            assert engine.checkpoint_engine is own
            engine.save_checkpoint(str(directory / "stock"))
            expected = train(engine)
            checkpointer.load_checkpoint(place)
            assert (engine.global_steps, checkpointer.loaded_from) == (1, "memory")
            train(engine)
            assert train(engine) == expected
            assert checkpointer.save_checkpoint(place, client_state={"epoch": 1})
            assert checkpointer.wait_latest_checkpoint() == 3


def test_arguments_of_save_and_load_checkpoint_act_as_in_deepspeed(directory):
    """Of stage 3 a model alone is put together from the shards of all; frozen parameters may be left out."""
    engine = engine_of(small(), config(3))
    with DeepSpeedCheckpointer(engine, directory) as one:
        train(engine, 2)
        one.save_checkpoint(directory, client_state={"epoch": 1}, storage_type=MEMORY)
        one._engine = other = engine_of(small(), config(3))
        _, client = one.load_checkpoint(directory, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert client["epoch"] == 1
        trained = _full(engine)
        assert all(torch.equal(value, trained[name]) for name, value in _full(other).items())
    model = small()
    model[0].weight.requires_grad_(False)
    engine = engine_of(model, config(2))
    with DeepSpeedCheckpointer(engine, directory / "frozen") as one:
        train(engine)
        for tag, without in [("all", False), ("less", True)]:
            one.save_checkpoint(directory / "frozen", tag, exclude_frozen_parameters=without)
            one.wait_latest_checkpoint()
            saved = torch.load(directory / "frozen" / tag / "mp_rank_00_model_states.pt", weights_only=False)
            assert ("0.weight" in saved["module"]) is not without
        one.load_checkpoint(directory / "frozen", "less", load_module_strict=False)


def test_a_damaged_checkpoint_and_a_newer_one_of_stock_are_passed_over(directory, caplog):
    engine = engine_of(small(), config(1))
    with DeepSpeedCheckpointer(engine, directory) as one:
        for _ in range(2):
            train(engine)
            one.save_checkpoint(directory)
            one.wait_latest_checkpoint()
        expected = train(engine)
        engine.save_checkpoint(directory)
        one.load_checkpoint(directory)
        assert engine.global_steps == 2 and "is passed over for step 2" in caplog.text
        one.load_checkpoint(directory, "global_step3")
        assert engine.global_steps == 3
    flip(directory / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    engine = engine_of(small(), config(1))
    with DeepSpeedCheckpointer(engine, directory) as one:
        one.load_checkpoint(directory)
        assert (one.loaded_step, one.loaded_from) == (1, "storage")
        train(engine)
        assert train(engine) == expected


def test_what_is_no_engine_or_an_unsupported_one_is_refused(directory):
    with pytest.raises(ConfigError, match="Linear is no DeepSpeedEngine"):
        DeepSpeedCheckpointer(torch.nn.Linear(1, 1), directory)
    engine = engine_of(small(), config(2))
    with pytest.raises(ConfigError, match=r"use fastckpt\.deepspeed\.DeepSpeedCheckpointer"):
        Checkpointer(directory, model=engine, optimizer=engine.optimizer)
    engine.optimizer.zenflow = True
    with pytest.raises(ConfigError, match="overlap is True, and the engine's optimizer has zenflow"):
        DeepSpeedCheckpointer(engine, directory, overlap=True)


def _full(engine):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


@pytest.mark.parametrize(("stage", "more"), KINDS)
def test_files_equal_those_of_deepspeed_and_load_both_ways(directory, tmp_path, stage, more):
    """The same names, sizes and contents; its engine loads ours, and ours loads its."""

    def make():
        return engine_of(small(), config(stage, **more))

    def go_on(engine):
        torch.manual_seed(1)
        return train(engine, 2)

    engine, theirs = make(), tmp_path / "theirs"
    with DeepSpeedCheckpointer(engine, directory) as one:
        train(engine, 2)
        assert {*reads(engine)} == {*files_of(engine, directory, "tag", {})}
        one.save_checkpoint(directory)
        one.wait_latest_checkpoint()
        engine.save_checkpoint(theirs)
        assert_same_files(directory / "global_step2", theirs / "global_step2")
        expected = go_on(engine)
        stock = make()
        stock.load_checkpoint(directory)
        assert go_on(stock) == expected
        one._engine = ours = make()
        one.load_checkpoint(theirs)
        assert (go_on(ours), one.loaded_step) == (expected, -1)
