"""Saves and loads that are refused, their messages, and the remedies these give."""

import enum
import os
import re
from typing import Any

import pytest
import torch

from fastckpt.deepspeed import DeepSpeedCheckpointer, StorageType
from fastckpt.errors import ConfigError
from tests.e2e.deepspeed.engines import BATCH, config, engine_of, small, train

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("process_group")]

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
TRACKER = "latest_checkpointed_iteration.txt"
BAD_TAGS = ("a ", ".hidden", "\ta", "a\nb", "a\0b", 201 * "x", "a/b", "../b", "latest", "checkpoint-7", TRACKER)
"""DeepSpeed reads `latest` without blanks at its ends; files cannot be called so; or a file of ours is."""
BAD_NAMES = ("../other", "/etc", "..", " ", "a\nb", "\x1b[2J", "x" * 5000)


def test_tags_and_files_that_name_nothing_in_the_directory_are_refused(directory):
    """Another user may have written the file `latest`, or made it a pipe."""
    engine = engine_of(small(), config(0))
    with DeepSpeedCheckpointer(engine, directory) as one:
        with pytest.raises(ConfigError, match="save_dir is elsewhere"):
            one.save_checkpoint("elsewhere")
        for tag in BAD_TAGS:
            with pytest.raises(ConfigError, match=re.escape(f"cannot be called {tag!r:.9}")):
                one.save_checkpoint(directory, tag)
        assert [path.name for path in directory.iterdir()] == [".fastckpt"]
        latest = directory / "latest"
        for text in (*BAD_NAMES, None):
            latest.unlink(missing_ok=True)
            os.mkfifo(latest) if text is None else latest.write_text(text)
            with pytest.raises(ConfigError, match=f"{latest} .*Give the tag of"):
                one.load_checkpoint(directory)


def test_a_storage_type_of_another_library_is_accepted_and_a_text_refused(directory):
    other = enum.Enum("StorageType", {"MEMORY": 0, "DISK": 1})
    engine = engine_of(small(), config(1))
    with DeepSpeedCheckpointer(engine, directory) as one:
        assert one.save_checkpoint(directory, "first", storage_type=other.MEMORY)
        assert one.save_checkpoint(directory, "second", storage_type=other.DISK)
        assert one.wait_latest_checkpoint(20) == 0
        assert {path.name for path in directory.iterdir()} > {"second", "latest", "zero_to_fp32.py"}
        assert not (directory / "first").exists()
        with pytest.raises(ValueError, match=r"storage_type is 'disk'; give StorageType\.MEMORY or StorageType\.DISK"):
            one.save_checkpoint(directory, "third", storage_type="disk")  # type: ignore[arg-type]


def micro_batch(engine: Any) -> float:
    loss = engine(BATCH).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.campaign)])
def test_a_save_amid_gradient_accumulation_warns_and_a_load_is_refused(directory, stage, caplog):
    """A save has none of them, and says so; a load does not add what is loaded to them."""
    engine = engine_of(small(), config(stage, gradient_accumulation_steps=2))
    with DeepSpeedCheckpointer(engine, directory) as one:
        for _ in range(4):
            micro_batch(engine)
        one.save_checkpoint(directory, storage_type=StorageType.MEMORY)
        assert "micro-batches" not in caplog.text
        expected = [micro_batch(engine) for _ in range(3)]
        with pytest.raises(ConfigError, match="the engine has gradients of 1 micro-batches"):
            one.load_checkpoint(directory)
        one.save_checkpoint(directory, "amid", storage_type=StorageType.MEMORY)
        assert "step 3 is saved when 1 micro-batches were added up" in caplog.text
        expected.append(micro_batch(engine))
        one.load_checkpoint(directory, "global_step2")
        assert [micro_batch(engine) for _ in range(4)] == expected


ALONE = "load the model alone, with load_optimizer_states=False"
WEIGHTS = "load its weights into the model before"


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        # DeepSpeed's files have other names then: it would fail when it has loaded half of them.
        (config(2, **BF16), config(2), r"bf16 \w+, now \w+:"),
        (config(2), config(2, **BF16), r"bf16 \w+, now \w+:"),
        (config(0), config(2), ALONE),
        (config(2), config(0), ALONE),
        (config(1), config(3), f"zero_stage 1, now 3.*{WEIGHTS}"),
        (config(0), config(3), WEIGHTS),
        (config(3), config(2), WEIGHTS),
        (config(1), config(2), ""),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_with_a_remedy_that_works(directory, saved, now, says):
    engine = engine_of(small(), saved)
    with DeepSpeedCheckpointer(engine, directory) as one:
        train(engine)
        one.save_checkpoint(directory, storage_type=StorageType.MEMORY)
        one._engine = other = engine_of(small(), now)
        if says:
            with pytest.raises(ConfigError, match=says):
                one.load_checkpoint(directory)
            assert other.global_steps == 0
        if WEIGHTS not in says:
            one.load_checkpoint(directory, load_optimizer_states=not says)
            assert other.global_steps == one.loaded_step == 1
            assert says not in (ALONE, "") or all(
                map(torch.equal, engine.module.parameters(), other.module.parameters())
            )
