"""Stack traces of a process on the request of another, whatever it is doing."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fastckpt._core.memory.stacks import Stacks, ask

IN_C_WITH_THE_GIL = "import re; re.compile('(a+)+$').match('a' * 60 + 'b')"
ASLEEP = "import time\n    while True: time.sleep(100)"


@contextmanager
def caught(body: str, before: str = "") -> Iterator[tuple[Any, int]]:
    """A process in ``body``, and what it offers."""
    program = f"""
import os, sys
{before}
from fastckpt._core.memory.stacks import offer
def hold_up():
    {body}
token = offer()
assert offer() == token
print(token, flush=True)
hold_up()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    token = int(process.stdout.readline())
    try:
        yield process, token
        assert process.poll() is None, "to be asked does not end it"
    finally:
        process.kill()
        process.communicate()


def ask_until_there(pid: int, token: int, function: str) -> Stacks:
    end = time.monotonic() + 60
    while True:
        found = ask({7: (pid, token)}, 10)[7]
        if (found.innermost and found.innermost.function == function) or time.monotonic() > end:
            return found


@pytest.mark.parametrize("body", [IN_C_WITH_THE_GIL, ASLEEP], ids=["in C with the GIL", "asleep"])
def test_stacks_of_all_threads_are_read_whatever_the_process_does(body: str):
    thread = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    with caught(body, before=thread) as (process, token):
        found = ask_until_there(process.pid, token, "hold_up")
        assert found.innermost is not None and str(found.innermost).startswith("hold_up (<string>:")
        assert found.text.count(" in hold_up\n") == 1, "each answer is of its own"
        assert " in <module>\n" in found.text and " in wait\n" in found.text


def test_only_a_process_that_offers_stacks_gets_the_signal_and_is_waited_for_with_a_limit():
    """To any other process it would be deadly, and to one that has reset its handlers."""
    body = """
    import signal
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_DFL)
    print("reset", flush=True)
    while True: pass"""
    with caught(ASLEEP) as (process, token), caught(body) as (reset, itself):
        assert reset.stdout.readline() == b"reset\n"
        other, pid = subprocess.Popen(["sleep", "60"]), process.pid
        process.send_signal(signal.SIGSTOP)
        asked = [(other.pid, token), (pid, 0), (2**22 + 1, token), (pid, token + 1), (pid, token), (reset.pid, itself)]
        assert ask(dict(enumerate(asked)), 0.2) == dict.fromkeys(range(6), Stacks())
        time.sleep(0.1)
        assert other.poll() is None
        other.kill()
        other.wait()


def test_offering_stacks_changes_no_other_handlers():
    before = """
import faulthandler, signal
fault, user, top = open(os.devnull, "w"), open(os.devnull, "w"), signal.SIGRTMAX - 2
faulthandler.enable(fault)
faulthandler.register(signal.SIGUSR1, user)
signal.signal(top, lambda *args: None)
signal.signal(top - 1, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {top - 2})
faulthandler.register(top - 3, user)
def handlers():
    return [line for line in open("/proc/self/status") if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
was = handlers()
"""
    body = """
    now = handlers()
    mask = lambda lines: int(lines[2].split()[1], 16)
    assert mask(now) ^ mask(was) == 1 << (top - 4 - 1), (was, now)
    assert was[:2] == now[:2] and faulthandler.is_enabled()
    os.kill(os.getpid(), top - 3); os.kill(os.getpid(), signal.SIGUSR1)
    while True: pass"""
    with caught(body, before) as (process, token):
        assert token >> 32 == signal.SIGRTMAX - 6
        assert " in hold_up\n" in ask_until_there(process.pid, token, "hold_up").text
