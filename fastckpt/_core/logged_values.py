"""Values that a script logs with `fastckpt.metrics.log`: checked, and the newest of each name."""

import operator
import os
import threading
from collections.abc import Callable, Mapping
from typing import SupportsFloat, SupportsIndex

from fastckpt._core.arguments import shown
from fastckpt.errors import ConfigError

MOST = 100
"""Names that one process may use."""
LONGEST = 100
"""Characters of a name."""
_LARGEST = 1 << 53

Value = SupportsFloat | SupportsIndex
"""A number, a NumPy scalar, or a tensor of one element."""


def as_step(step: SupportsIndex) -> int:
    """The step as a plain number; raises ConfigError."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _LARGEST:
        raise ConfigError(f"the step of metrics.log is {shown(step)}; give a whole number, 0 or more")
    return number


def as_number(name: str, value: Value) -> float:
    """The value as a plain number, NaN and infinity included; raises ConfigError."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(getattr(value, "detach", lambda: value)())
    # Errors of torch, NumPy and others for values with several elements, or on the meta device.
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"the value {name!r} of metrics.log is {shown(value)}; give a number, or a tensor of one element, such as "
            "loss.mean()"
        ) from error


def checked_name(name: object) -> str:
    """A name as it may be; raises ConfigError."""
    if isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable() and name.strip() == name:
        return name
    raise ConfigError(
        f"a name of metrics.log is {shown(name)}; give 1 to {LONGEST} printable characters, no spaces around them, "
        "such as 'train/loss'"
    )


class LoggedValues:
    """The newest value of each name that this process has logged, and which of them were not sent yet.

    All methods may be called in any thread. A forked child begins without values.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._names: set[str] = set()
        self._unsent: dict[str, float] = {}
        self._step = 0
        self._changed = threading.Condition()
        self._follower: Callable[[], None] | None = None

    def put(self, step: SupportsIndex, values: Mapping[str, Value]) -> tuple[int, dict[str, float]]:
        """Log values, which are returned as plain numbers; raises ConfigError, and then logs none of them."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"the values of metrics.log are {shown(values)}; give a dictionary, such as {{'loss': 0.1}}"
            )
        number = as_step(step)
        numbers = {checked_name(name): as_number(name, value) for name, value in values.items()}
        with self._changed:
            if len(self._names | numbers.keys()) > MOST:
                new = next(name for name in numbers if name not in self._names)
                raise ConfigError(
                    f"{new!r} would be name {MOST + 1} or later that metrics.log is given; a process may use {MOST}: "
                    "leave out steps, indices and the like from names"
                )
            self._names |= numbers.keys()
            self._unsent |= numbers
            self._step = number
            self._changed.notify()
            follower, self._follower = self._follower, None
        if follower is not None:
            follower()
        return number, numbers

    def follow(self, follower: Callable[[], None]) -> None:
        """Call ``follower`` once: when the next values are logged, or now if some were not sent."""
        with self._changed:
            if not self._unsent:
                self._follower = follower
                return
        follower()

    def wait(self) -> None:
        """Wait until there is something to send."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent)

    def take(self) -> tuple[int, dict[str, float]]:
        """Take the values that were not sent yet, and the step of the newest."""
        with self._changed:
            unsent, self._unsent = self._unsent, {}
            return self._step, unsent

    @property
    def is_of_parent(self) -> bool:
        """True if the process inherited the values by a fork: a thread of the parent may have held their lock."""
        return self._pid != os.getpid()
