"""Saved files, one by one, beside those of transformers' own Trainer in the same run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import HubStrategy

from fastckpt._core.native.folder_checkpointer import FolderCheckpointer, RequiredFiles, StorageType
from fastckpt.ddp import KeepLatestStepStrategy
from fastckpt.errors import ConfigError
from fastckpt.huggingface import FastCheckpointTrainer, FlashCkptTrainer, get_last_checkpoint
from fastckpt.huggingface.trainer_session import check
from fastckpt.huggingface.weights import Weights, objection, weight_files
from tests.e2e.huggingface.stock import make_model, parse_arguments, training_arguments
from tests.e2e.huggingface.train import trained

pytestmark = pytest.mark.frameworks

OURS = {"manifest.json"}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - OURS


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return [*one] == [*two] and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    if isinstance(one, TrainingArguments):
        return {**one.to_dict(), "output_dir": ""} == {**two.to_dict(), "output_dir": ""}
    return type(one) is type(two) and bool(one == two)


def read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text().replace(str(path.parents[1]), ""))
    if path.suffix in (".pt", ".pth") or path.name == "training_args.bin":
        return torch.load(path, weights_only=False)
    return path.read_bytes()


def assert_same(theirs: Path, ours: Path) -> None:
    assert names(theirs) == names(ours)
    for name in names(theirs):
        assert equal(read(theirs / name), read(ours / name)), name


def assert_stock_tools_read(trainer: Trainer, folder: Path) -> None:
    last = folder / "checkpoint-6"
    loaded = AutoModelForCausalLM.from_pretrained(last)
    assert equal(dict(loaded.state_dict()), {k: v.detach() for k, v in trainer.model.state_dict().items()})
    trainer.save_model(str(folder / "mine"))
    assert (folder / "mine/model.safetensors").read_bytes() == (last / "model.safetensors").read_bytes()
    assert get_last_checkpoint(folder) == str(last)
    assert FlashCkptTrainer is FastCheckpointTrainer


CASES = {
    "plain": [],
    "own": ["--kind", "own"],
    "lora": ["--way", "lora"],
    "only_model": ["--set", "save_only_model=true"],
    "epochs": ["--set", 'save_strategy="epoch"'],
    "bf16": ["--set", "bf16=true"],
}


@pytest.mark.parametrize("case", ["plain", *[pytest.param(name, marks=pytest.mark.campaign) for name in [*CASES][1:]]])
def test_saved_files_equal_those_of_trainer_and_stock_tools_read_them(tmp_path, case):
    trained(tmp_path / "theirs", *[each for each in CASES[case] if case != "own"], ours=False)
    trainer = trained(tmp_path / "ours", *CASES[case])
    if case == "plain":
        assert_stock_tools_read(trainer, tmp_path / "ours")
    found = sorted(path.name for path in (tmp_path / "theirs").glob("checkpoint-*"))
    assert found == sorted(path.name for path in (tmp_path / "ours").glob("checkpoint-*")) and found
    for name in found:
        if case == "own":
            own = tmp_path / "ours" / name / "own.txt"
            assert own.read_text() == f"step {name.split('-')[1]}"
            own.unlink()
        assert_same(tmp_path / "theirs" / name, tmp_path / "ours" / name)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, "intermediate_size": 8}


def models() -> dict[str, Any]:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True))
    return {
        "tied": make_model("ddp"),
        "tied too": llama,
        "other names": BertForMaskedLM(BertConfig(**SMALL)),
        "converted": MixtralForCausalLM(MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)),
        "half": make_model("ddp").to(torch.bfloat16),
    }


@pytest.mark.parametrize("size", ["8KB", "50GB"])
def test_weights_are_laid_out_as_save_pretrained_does(tmp_path, size):
    for name, model in models().items():
        assert not objection(model)
        files = weight_files(model, size)
        assert (len(files) > 1) == (size == "8KB")
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        with FolderCheckpointer(tmp_path / "ours" / name, RequiredFiles(min(files), min(files))) as one:
            one.save_checkpoint(1, files, StorageType.DISK)
            one.wait_latest_checkpoint()
        ours = tmp_path / "ours" / name / "checkpoint-1"
        assert names(tmp_path / name) - {"config.json", "generation_config.json"} == names(ours) == files.keys()
        for file in files:
            assert equal(read(tmp_path / name / file), read(ours / file)), (name, file)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ({"push_to_hub": True, "hub_strategy": "every_save"}, {}, "hub_strategy='end'"),
        ({"auto_find_batch_size": True}, {}, "per_device_train_batch_size"),
        ({"save_on_each_node": True}, {}, "output_dir that they share"),
        ({"save_total_limit": 2}, {"deletion_strategy": KeepLatestStepStrategy(1, "x")}, "give one"),
        ({}, {"verfy": "never"}, "has verfy; known are"),
    ],
)
def test_unsupported_training_arguments_are_refused_with_a_remedy(tmp_path, given, options, said):
    args = training_arguments(parse_arguments("--out", str(tmp_path), "--checkpoint-dir", str(tmp_path)))
    for name, value in given.items():
        setattr(args, name, HubStrategy(value) if name == "hub_strategy" else value)
    trainer = FastCheckpointTrainer.__new__(FastCheckpointTrainer)
    trainer.args, trainer.is_deepspeed_enabled = args, False
    with pytest.raises(ConfigError, match=said):
        check(trainer, options)
    trainer.save_memory_steps = -1
    with pytest.raises(ConfigError, match="save_memory_steps is -1"):
        trainer.train()


@torch.no_grad()
def test_a_remembered_weight_layout_equals_a_new_one():
    for name, model in models().items():
        weights = Weights()

        def check_now(name=name, model=model, weights=weights):
            assert not weights.objection(model)
            found, now = weights.files(model), weight_files(model)
            assert found.keys() == now.keys(), name
            for file in found:
                assert equal(dict(found[file].tensors), dict(now[file].tensors)), name

        check_now()
        for change in (
            lambda model: [each.add_(1) for each in model.parameters()],
            lambda model: setattr(next(model.parameters()), "data", next(model.parameters()).data * 2),
            lambda model: model.to(torch.float64),
            lambda model: setattr(model, "more", nn.Linear(3, 3)),
        ):
            change(model)
            check_now()
