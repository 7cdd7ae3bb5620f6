"""Probes of one member: whether its agent answers, and if not, what is wrong with it."""

import asyncio
import time
from enum import StrEnum

from fastckpt_run.detection.authenticated_link import AuthenticatedLink, ForgedMessage, Purpose, connection

PROBE = "probe"
PAUSE = 0.1
"""Seconds between two attempts to reach a member."""


class State(StrEnum):
    """What a probe has found."""

    ALIVE = "the agent answers"
    GONE = "its process is gone, and its host answers"
    FROZEN = "its process is frozen: the host's kernel accepts connections, and the process does not answer"
    UNREACHABLE = "its host does not answer"


async def state_of(address: str, secret: bytes, own_id: str, member: str, seconds: float) -> State:
    """Probe a member by new connections until it answers, for so many seconds at most."""
    end, found = time.monotonic() + seconds, State.UNREACHABLE
    while (left := end - time.monotonic()) > 0:
        found = await _attempt(address, secret, Purpose(PROBE, own_id, member), left)
        if found is State.ALIVE:
            break
        await asyncio.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
    return found


async def _attempt(address: str, secret: bytes, purpose: Purpose, seconds: float) -> State:
    found = State.UNREACHABLE
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await connection(address)
            found = State.FROZEN  # unless it answers: so far the kernel has
            (await AuthenticatedLink.initiate(reader, writer, secret, purpose)).close()
        return State.ALIVE
    except TimeoutError:
        return found
    except (ConnectionError, ForgedMessage):  # refused, closed, or another process has taken the port
        return State.GONE
    except OSError:  # such as no route
        return State.UNREACHABLE
