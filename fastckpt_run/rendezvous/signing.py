"""Signatures of records that agents leave in a store which strangers may reach."""

import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

from fastckpt._core.config import SECRET_VARIABLE, Settings, copy_of_environment
from fastckpt._core.error_codes import coded
from fastckpt.errors import ConfigError

VERSION = b"1"
MOST_BYTES = 1 << 20
"""The largest record that is read: the list of some thousand nodes."""
_FEWEST = 16


class Refused(Exception):
    """A record that is not of this job, with the reason."""


class Signer:
    """Writes and reads records ``version mac json``, each bound to the key under which it is stored.

    A record copied to another key is refused like one of another secret. Keys name the round in which they are used, so
    a record of an earlier round is refused, too.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @property
    def fingerprint(self) -> str:
        """A name of the secret, from which it cannot be found."""
        return self._mac("fingerprint", b"").decode()[:16]

    def seal(self, key: str, body: dict[str, Any]) -> bytes:
        """A record of ``body``, to be stored under ``key``."""
        text = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
        return b" ".join((VERSION, self._mac(key, text), text))

    def open(self, key: str, record: bytes) -> dict[str, Any]:
        """The body of a record that was found under ``key``; raises Refused before anything is parsed."""
        if len(record) > MOST_BYTES:
            raise Refused(f"it has {len(record)} bytes, more than {MOST_BYTES}")
        version, _, rest = record.partition(b" ")
        mac, _, text = rest.partition(b" ")
        if not rest:
            raise Refused("it is truncated, or no record at all")
        if version != VERSION:
            raise Refused(
                coded(
                    f"its version is {version[:8]!r}, ours is {VERSION!r}: run one version of fastckpt everywhere",
                    "FC-034",
                )
            )
        if not hmac.compare_digest(mac, self._mac(key, text)):
            raise Refused("its signature is not of this job's secret, or it was made for another place")
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refused(f"it is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refused("it is no JSON object")
        return body

    def _mac(self, key: str, text: bytes) -> bytes:
        return hmac.new(self._secret, key.encode() + b"\0" + text, hashlib.sha256).hexdigest().encode()


def secret_of(settings: Settings) -> bytes | None:
    """The secret that the user gave to the job; None if none. Raises ConfigError, which does not quote it."""
    if not settings.secret_file:
        given = copy_of_environment().get(SECRET_VARIABLE, "").strip().encode()
        return _long_enough(given, SECRET_VARIABLE) if given else None
    path = Path(settings.secret_file)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read(4096).strip()
    except OSError as error:
        raise ConfigError(coded(f"the secret cannot be read from {path}: {error.strerror}", "FC-035")) from error
    mode = stat.S_IMODE(status.st_mode)
    # Kubernetes mounts a Secret as root's, and lets a pod that is not root read it by its group: fsGroup.
    by_group = 0o040 if status.st_uid == 0 != os.getuid() else 0
    if mode & 0o077 & ~by_group:
        text = f"{path} has mode {mode:04o}, so others can read the secret of the job; chmod 600 {path}"
        raise ConfigError(coded(text, "FC-035"))
    return _long_enough(secret, str(path))


def _long_enough(secret: bytes, place: str) -> bytes:
    if len(secret) < _FEWEST:
        text = f"the secret in {place} has {len(secret)} bytes, fewer than {_FEWEST}; openssl rand -hex 32"
        raise ConfigError(coded(text, "FC-035"))
    return secret
