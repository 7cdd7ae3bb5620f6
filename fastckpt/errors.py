"""Errors of fastckpt; each message gives the value, the limit and the remedy."""

from fastckpt._core.error_codes import code_of


class FastckptError(Exception):
    """Base of all errors of this project."""

    @property
    def code(self) -> str:
        """The code, such as ``FC-001``, with which the message ends: its entry in docs/errors.md. Empty without one."""
        return code_of(str(self))


class ConfigError(FastckptError, ValueError):
    """A setting has a value that cannot be used."""


class WrongDirectory(ConfigError):
    """The checkpoint directory on this host is not that of other nodes."""


class UnsupportedTorch(FastckptError, ImportError):
    """The installed torch is too old."""

    def __init__(self, message: str) -> None:
        super().__init__(message, name="torch")


class ArgumentError(ConfigError, TypeError):
    """An argument is missing, unknown, or of a wrong type."""


class NoRankState(FastckptError, KeyError):
    """A rank saved nothing under this name."""

    __str__ = Exception.__str__


class ArenaTooSmall(FastckptError):
    """Shared memory cannot hold the slots of a checkpoint directory."""


class ArenaInUse(FastckptError):
    """Another live job owns the arena of the directory."""


class AgentLost(FastckptError, ConnectionError):
    """The owner of the arena does not answer."""


class SaverError(FastckptError):
    """The owner of the arena failed; its log has the traceback."""


class ProtocolError(FastckptError):
    """This version does not understand a message."""


class StepError(FastckptError, ValueError):
    """A step cannot be saved in this history."""


class NotLoadable(FastckptError, TypeError):
    """A state does not load with ``weights_only=True``."""


class BadCheckpoint(FastckptError):
    """A checkpoint or file is incomplete or damaged."""


class NoLoadableCheckpoint(FastckptError):
    """Checkpoints exist, but none loads on all ranks."""


class ReplicasDiffer(FastckptError):
    """Replicas of a weight or optimizer state are not equal any more."""


class OverlapError(FastckptError):
    """A tensor changed while it was copied in the background."""


class PersistError(FastckptError):
    """A checkpoint could not be made durable."""


class NewerFormat(PersistError):
    """A checkpoint was written by a later version of fastckpt: it is not damaged, and this version cannot read it."""


class Superseded(PersistError):
    """Another job saves to this place: saves of this one do not count."""


class PlaceInUse(FastckptError):
    """Another live job saves to this directory or remote store."""


class NotDurable(PersistError):
    """A job ended without its newest checkpoint durable."""


class OffloadError(FastckptError):
    """Offloaded activations cannot be read back for the backward."""
