"""Where a training thread is seen, as a background copy compares it; and whether training leaves a core for it."""

import threading
import time
from collections.abc import Callable

from fastckpt._core.snapshot.background_copy import _position
from fastckpt._core.transfer.host_copy import leaves_none
from tests.support.tables import for_each

Place = tuple[object, int] | None


def place_in(thread: threading.Thread, ready: Callable[[], bool]) -> Place:
    """The place of a thread, once it is in an operation and stays there."""
    end = time.monotonic() + 60
    before: Place = None
    while not ready() or before is None or _position(thread.ident or 0) != before:
        assert time.monotonic() < end, "the thread stays nowhere"
        before = _position(thread.ident or 0)
        time.sleep(0.01)
    return before


def test_each_call_of_a_function_is_a_place_of_its_own() -> None:
    """Layers of one class: without a frame that is kept, that of the next call would be made where the first was."""
    locks = [threading.Lock() for _ in range(20)]
    for lock in locks:
        lock.acquire()
    begun: list[int] = []

    def operation(number: int) -> None:
        begun.append(number)
        locks[number].acquire()

    training = threading.Thread(target=lambda: [operation(number) for number in range(len(locks))])
    training.start()
    places: list[Place] = []
    for number, lock in enumerate(locks):
        places.append(place_in(training, lambda number=number: begun[-1:] == [number]))  # type: ignore[misc]
        assert _position(training.ident or 0) == places[-1], "one that is in an operation has not moved"
        if number:
            assert places[-2] != places[-1]
            places[-2] = None  # as the thread that copies keeps one at a time
        lock.release()
    training.join()


@for_each(
    (1, 0.0, False),  # it waits, as for a device or for data
    (1, 1.0, True),
    (2, 1.4, False),
    (2, 1.6, True),
    (16, 11.0, False),
    (16, 13.0, True),  # 16 threads, a fifth of the time alone
)
def test_training_leaves_no_core_if_it_uses_most_of_all(cores: int, used: float, none: bool):
    assert leaves_none(cores, 1.0, used) is none
    assert leaves_none(cores, 0.1, used / 10) is none
