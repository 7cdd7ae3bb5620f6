"""Probes of one member: whether its agent answers, and if not, its fault."""

import asyncio
import time
from enum import StrEnum

from fastckpt_run.detection.authenticated_link import AuthenticatedLink, ForgedMessage, Purpose, connection

PROBE, ASK = "probe", "ask"
PAUSE = 0.1
"""Seconds between two attempts to reach a member."""
CONNECT = 0.15
"""Seconds in which its kernel has to accept a connection; then comes another attempt. Packets that are sent while a
link is down are lost, and the kernel sends them again only after a second."""


class State(StrEnum):
    """Finding of a probe."""

    ALIVE = "the agent answers"
    GONE = "its process is gone, and its host answers"
    FROZEN = "its process is frozen: it was stopped by a signal"
    STARVED = "the host's kernel accepts connections, and no process answers"
    UNREACHABLE = "its host does not answer"


STATE, MEMBER = "state", "member"
"""Names of a probed member's report on its agent, and of the member that another one is asked to probe."""


async def state_of(address: str, secret: bytes, own_id: str, member: str, seconds: float) -> State:
    """Probe a member by new connections until it answers, for so many seconds at most."""
    end, found = time.monotonic() + seconds, State.UNREACHABLE
    while (left := end - time.monotonic()) > 0:
        state = await _attempt(address, secret, Purpose(PROBE, own_id, member), left)
        if state is State.ALIVE:
            return state
        if (found, state) != (State.STARVED, State.UNREACHABLE):  # the last attempt may have had too little time
            found = state
        await asyncio.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
    return found


async def state_by(address: str, helper: str, secret: bytes, own_id: str, member: str, seconds: float) -> State | None:
    """Return the finding of another member, the ``helper`` at ``address``, that probes one; None without answer."""
    try:
        async with asyncio.timeout(seconds):
            link = await AuthenticatedLink.open(address, secret, Purpose(ASK, own_id, helper))
            try:
                await link.send({MEMBER: member})
                return State(str((await link.receive()).get(STATE)))
            finally:
                link.close()
    except (OSError, ForgedMessage, ValueError):
        return None


async def _attempt(address: str, secret: bytes, purpose: Purpose, seconds: float) -> State:
    found = State.UNREACHABLE
    try:
        async with asyncio.timeout(seconds):
            async with asyncio.timeout(CONNECT):
                reader, writer = await connection(address)
            found = State.STARVED  # unless it answers: so far the kernel has
            link = await AuthenticatedLink.initiate(reader, writer, secret, purpose)
            try:
                return State(str((await link.receive()).get(STATE)))
            finally:
                link.close()
    except TimeoutError:
        return found
    except (ConnectionRefusedError, ForgedMessage, ValueError):  # or another process has taken the port
        return State.GONE
    except ConnectionError:  # such as closed by one that has waited for this process, which did not run
        return found
    except OSError:  # such as no route
        return State.UNREACHABLE
