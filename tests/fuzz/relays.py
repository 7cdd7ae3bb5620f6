"""A relay between two ends of a TCP connection, which does harm on the way; and messages that are not true."""

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzz.mutations import TELLING, mutated

HARMS = ("change", "cut", "length", "repeat", "swap", "replay", "insert", "drip", "hang up", "nothing")
LONG = [
    struct.pack("<I", number) for number in (1 << 10, (1 << 10) + 1, 4 << 20, (4 << 20) + 1, (1 << 31), (1 << 32) - 1)
]
VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 1.5, 1 << 31, 1 << 63, 1 << 70, 10**30, 1e308, float("inf"), float("nan"),
    "", "0", "..", "../../outside", "/etc/passwd", ".done-0", "a/../b", "\0", "\ud800", "x" * 5000, "9" * 5000,
    [], {}, [[]], [[[[[]]]]], [0, 0], [1, 5], {"": ""}, {"0": {}}, [None] * 3, ["model.pt", 1 << 40],
    json.loads(400 * "[" + 400 * "]"),
)  # fmt: skip
"""What is put in the place of a value."""


def untrue(message: Any, chance: random.Random) -> Any:
    """A message with one to three of its parts changed, removed, added, or exchanged for another of its parts."""
    found = json.loads(json.dumps(message))
    for _ in range(chance.randint(1, 3)):
        places = [*_places(found)]
        if not places:
            return found
        inside, at = chance.choice(places)
        match chance.randrange(6):
            case 0:
                del inside[at]
            case 1 if isinstance(inside, dict):
                inside[str(chance.choice(VALUES))] = inside.pop(at)
            case 2:
                there, other = chance.choice(places)
                inside[at] = json.loads(json.dumps(there[other]))
            case 3 if type(inside[at]) is int:
                inside[at] += chance.choice((-1, 1, 1 << 20))
            case _:
                inside[at] = json.loads(json.dumps(chance.choice(VALUES)))
    return found


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """The parts of a message: what each is in, and its key there; but for those that are nested deeply."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in [*inner]:
        if key != "ask":
            yield value, key
        if depth < 20:
            yield from _places(part, depth + 1)


class Relay:
    """Passes on what both ends of each connection say, but for one thing, drawn anew for each.

    Attributes:
        address: Where clients connect instead, HOST:PORT.
        passed: Messages, or pieces of these, that were passed on.
    """

    def __init__(self, target: str, seed: int, harms: Sequence[str] = HARMS) -> None:
        self.target, self._chance, self._harms = target, random.Random(seed), harms
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = 0
        self._seen: deque[bytes] = deque(maxlen=256)
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            server = socket.create_connection((host, int(port)), 30)
            ends = [client, server]
            # One direction is harmed, at one of its first messages: a later one would seldom come.
            harmed, at, harm = self._chance.randrange(3), self._chance.randrange(4), self._chance.choice(self._harms)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            is_last = threading.Semaphore(1)
            for way in (0, 1):
                number = at if way == min(harmed, 1) ^ 1 else -1  # that of the client, more often
                arguments = (ends[way], ends[1 - way], number, harm, random.Random(self._chance.random()), is_last)
                self._threads.append(threading.Thread(target=self._pass_on, args=arguments))
                self._threads[-1].start()

    def _pass_on(
        self, source: socket.socket, sink: socket.socket, at: int, harm: str, chance: random.Random, is_last: Any
    ) -> None:
        number, held = 0, b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                self.passed += 1
                if number == at and harm != "nothing":
                    data, held = self._harmed(data, harm, chance, sink)
                elif held:
                    data, held = data + held, b""
                self._seen.append(data[: 1 << 12])
                sink.sendall(data)
                number += 1
                if number > at >= 0 and harm in ("cut", "hang up"):
                    break
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if not is_last.acquire(blocking=False):  # the other way has ended, too
            source.close()
            sink.close()

    def _harmed(self, data: bytes, harm: str, chance: random.Random, sink: socket.socket) -> tuple[bytes, bytes]:
        """What is sent in the place of some data now, and after what comes next."""
        place = chance.randrange(len(data))
        match harm:
            case "change":
                kind, piece = chance.choice(("flip", "write", "remove", "insert", "repeat")), chance.choice(TELLING)
                return mutated(data, [(kind, chance.random(), chance.randrange(64), piece)]), b""
            case "cut":
                return data[:place], b""
            case "length":
                return chance.choice(LONG) + data[4:], b""
            case "repeat":
                return data + data, b""
            case "swap":
                return b"", data
            case "replay" if self._seen:
                return chance.choice([*self._seen]), b""
            case "insert":
                return chance.randbytes(chance.choice((1, 4, 40, 5000))) + data, b""
            case "drip":
                for byte in data[:20]:
                    sink.sendall(bytes([byte]))
                    time.sleep(0.001)
                return data[20:], b""
            case "hang up":
                return b"", b""
        return data, b""
