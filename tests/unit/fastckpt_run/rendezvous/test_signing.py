"""Signatures of records, and the secret that makes them."""

import pytest

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.rendezvous.signing import MOST_BYTES, Refused, Signer, secret_of

SECRET = b"0123456789abcdef"
SIGNER = Signer(SECRET)
GOOD = SIGNER.seal("here", {"n": 1})


@pytest.mark.parametrize(
    ("key", "record", "why"),
    [
        ("there", GOOD, "made for another place"),
        ("here", Signer(b"another secret...").seal("here", {"n": 1}), "signature is not of this job's secret"),
        ("here", GOOD.replace(b"1}", b"2}"), "signature is not of this job's secret"),
        ("here", GOOD[:-1], "signature is not of this job's secret"),
        ("here", GOOD[:5], "signature is not of this job's secret"),
        ("here", GOOD[:1], "truncated"),
        ("here", b"", "truncated"),
        ("here", b"2" + GOOD[1:], "version"),
        ("here", b"\x80\x04\x95 pickled", "version"),
        ("here", GOOD + b" " * MOST_BYTES, "bytes, more than"),
    ],
)
def test_a_record_that_is_not_of_the_job_is_refused_with_the_reason(key, record, why):
    with pytest.raises(Refused, match=why):
        SIGNER.open(key, record)


def test_a_record_comes_back_from_the_place_for_which_it_was_made_if_it_is_an_object():
    assert SIGNER.open("here", GOOD) == {"n": 1}
    sealed = SIGNER.seal("here", [1])
    with pytest.raises(Refused, match="no JSON object"):
        SIGNER.open("here", sealed)


def test_a_secret_is_read_from_a_file_that_only_its_owner_reads(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    assert secret_of(Settings(secret_file=str(file))) == SECRET
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 0640, so others can read .*; chmod 600 {file}") as refused:
        secret_of(Settings(secret_file=str(file)))
    assert SECRET.decode() not in str(refused.value)


def test_a_short_secret_and_one_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read from .*: No such file"):
        secret_of(Settings(secret_file=str(tmp_path / "none")))
    (tmp_path / "short").write_text("abc\n")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(ConfigError, match=r"has 3 bytes, fewer than 16; openssl rand -hex 32"):
        secret_of(Settings(secret_file=str(tmp_path / "short")))


def test_a_secret_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv("FASTCKPT_SECRET", raising=False)
    assert secret_of(Settings()) is None
    monkeypatch.setenv("FASTCKPT_SECRET", SECRET.decode())
    assert secret_of(Settings()) == SECRET
