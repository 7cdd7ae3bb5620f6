"""Signatures of records, and the secret that makes them."""

import pytest

from fastckpt._core.config import Settings
from fastckpt.errors import ConfigError
from fastckpt_run.rendezvous.signing import MOST_BYTES, Refused, Signer, secret_of

SECRET = b"0123456789abcdef"
SIGNER = Signer(SECRET)
GOOD = SIGNER.seal("here", {"n": 1})


REFUSED = [
    (GOOD[:-1], "signature is not of this job's secret"),
    (GOOD.replace(b"1}", b"2}"), "signature is not of this job's secret"),
    (Signer(b"another secret...").seal("here", {"n": 1}), "signature is not of this job's secret"),
    (GOOD[:5], "signature is not of this job's secret"),
    (GOOD[:1], "truncated"),
    (b"", "truncated"),
    (b"2" + GOOD[1:], "version"),
    (b"\x80\x04\x95 pickled", "version"),
    (GOOD + b" " * MOST_BYTES, "bytes, more than"),
    (SIGNER.seal("here", [1]), "no JSON object"),
    (SIGNER.seal("there", {"n": 1}), "made for another place"),
]


def test_a_record_is_that_of_the_job_and_of_the_place_for_which_it_was_made_or_refused():
    assert SIGNER.open("here", GOOD) == {"n": 1}
    for record, why in REFUSED:
        with pytest.raises(Refused, match=why):
            SIGNER.open("here", record)


def test_a_secret_is_read_from_the_environment_or_a_file_that_only_its_owner_reads(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"cannot be read from .*: No such file"):
        secret_of(Settings(secret_file=str(file)))
    file.write_bytes(b"abc\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"has 3 bytes, fewer than 16; openssl rand -hex 32"):
        secret_of(Settings(secret_file=str(file)))
    file.write_bytes(SECRET + b"\n")
    assert secret_of(Settings(secret_file=str(file))) == SECRET
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 0640, so others can read .*; chmod 600 {file}") as refused:
        secret_of(Settings(secret_file=str(file)))
    assert SECRET.decode() not in str(refused.value)
    monkeypatch.delenv("FASTCKPT_SECRET", raising=False)
    assert secret_of(Settings()) is None
    monkeypatch.setenv("FASTCKPT_SECRET", SECRET.decode())
    assert secret_of(Settings()) == SECRET
