"""Addresses of checkpoints on the command line."""

import pytest

from fastckpt._core.inspect.address import Address, parse
from fastckpt.errors import ConfigError


def test_a_path_that_exists_is_taken_literally_and_an_unknown_tier_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, address in (
        ("run@7.2:memory", Address("run", 7, 2, "memory", explicit=True)),
        ("run@latest:storage", Address("run", tier="storage", explicit=True)),
        ("me@home/run", Address("me@home/run")),
        ("run@5@7", Address("run@5", 7, explicit=True)),
        ("s3://me@host:9000/run@7", Address("s3://me@host:9000/run", 7, explicit=True)),
    ):
        assert parse(text) == address and str(address) == text
    (tmp_path / "run@5").mkdir()
    assert parse("run@5") == Address("run@5")
    assert parse("./run@5@latest") == Address("./run@5", explicit=True)
    with pytest.raises(ConfigError, match=r"'disk'.*memory, storage"):
        parse("run@6:disk")
