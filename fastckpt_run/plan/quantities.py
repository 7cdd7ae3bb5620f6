"""Options with a unit: times such as 4h, bytes such as 64GiB, rates in MB/s, intervals in steps."""

import math
import re

import click

from fastckpt._core.byte_sizes import parsed
from fastckpt._core.policy.frequency.requested import RequestedIntervals, parse
from fastckpt.errors import ConfigError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 1e10
"""Seconds of 300 years, beyond which no time is meant."""
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))? ?([a-z]*)")


def positive_seconds(text: str) -> float:
    """The seconds of a time above 0, with or without a unit; raises click.BadParameter."""
    if (seconds := _seconds(text)) is None or seconds == 0:
        raise click.BadParameter(_no_time(text, "above 0"))
    return seconds


def seconds_or_none(text: str) -> float:
    """The seconds of a time that may be 0; raises click.BadParameter."""
    if (seconds := _seconds(text)) is None:
        raise click.BadParameter(_no_time(text, "of 0 or more"))
    return seconds


def _seconds(text: str) -> float | None:
    match = _TIME.fullmatch(text.strip())
    if match is None or match[3] not in _UNITS:
        return None
    seconds = float(f"{match[1]}e{match[2] or 0}") * _UNITS[match[3]]
    return seconds if seconds <= _LONGEST else None


def _no_time(text: str, allowed: str) -> str:
    units = ", ".join(filter(None, _UNITS))
    return f"{text!r} is no time {allowed} and below 300 years; give a number with a unit of {units}, such as 4h"


def positive_bytes(text: str) -> int:
    """A number of bytes above 0, with or without a unit; raises click.BadParameter."""
    try:
        size = parsed(text)
    except ValueError:
        size = 0
    if not 0 < size < 1 << 62:
        raise click.BadParameter(f"{text!r} is no size above 0; give bytes, such as 64GiB or 500MB")
    return size


def bytes_per_second(text: str) -> float:
    """The bytes per second of a rate in MB (10**6 bytes) per second, above 0; raises click.BadParameter."""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate > 0):
        raise click.BadParameter(f"{text!r} is no rate above 0; give MB per second, such as 800")
    return rate * 1e6


def intervals(text: str) -> RequestedIntervals:
    """Steps between saves to memory and to storage, as ``M`` or ``M,S``; raises click.BadParameter."""
    match = re.fullmatch(r"(\d{1,10})(?:,(\d{1,10}))?", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} are no intervals; give steps for memory and storage, such as 10,100")
    try:
        return parse({"memory": int(match[1]), "storage": int(match[2] or match[1])})
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
