"""The errors that fastckpt raises; each message gives the value, the limit and the remedy."""

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
    """The checkpoint directory on this host is not the one in which the other nodes of the job save."""


class UnsupportedTorch(FastckptError, ImportError):
    """The torch that is installed is older than all that this library works with."""

    def __init__(self, message: str) -> None:
        super().__init__(message, name="torch")


class ArgumentError(ConfigError, TypeError):
    """An argument is missing, unknown, or of another kind than what is allowed."""


class NoRankState(FastckptError, KeyError):
    """A rank has nothing under a name in what ranks saved for themselves."""

    __str__ = Exception.__str__


class ArenaTooSmall(FastckptError):
    """Shared memory cannot hold the slots that a checkpoint directory needs."""


class ArenaInUse(FastckptError):
    """Another live job owns the arena of this checkpoint directory."""


class AgentLost(FastckptError, ConnectionError):
    """The process that owns the arena does not answer."""


class SaverError(FastckptError):
    """The process that owns the arena met an error of its own; its log has the traceback."""


class ProtocolError(FastckptError):
    """A message is not one that this version understands."""


class StepError(FastckptError, ValueError):
    """A step cannot be saved in this history."""


class NotLoadable(FastckptError, TypeError):
    """A state would save but not load with ``weights_only=True``."""


class BadCheckpoint(FastckptError):
    """A checkpoint, or one of its files, is incomplete or damaged."""


class NoLoadableCheckpoint(FastckptError):
    """Checkpoints exist, but none of them can be loaded by all ranks."""


class ReplicasDiffer(FastckptError):
    """Replicas of a weight, or of an optimizer's state, were equal and are not any more."""


class OverlapError(FastckptError):
    """A tensor changed, unnoticed, while it was copied in the background."""


class PersistError(FastckptError):
    """A checkpoint could not be made durable."""


class Superseded(PersistError):
    """Another job saves to this place, or has: what this one saves counts no more there."""


class PlaceInUse(FastckptError):
    """Another live job saves to this checkpoint directory, or to its remote store."""


class NotDurable(PersistError):
    """A job that had to end with its newest checkpoint durable has ended without."""


class OffloadError(FastckptError):
    """Activations that were offloaded cannot be read back, so the backward that needs them cannot be completed."""
