"""The newest values that the scripts of a node's ranks have logged, in bounded memory."""

import threading

from fastckpt._core.ipc.messages import Logged
from fastckpt._core.logged_values import LONGEST, MOST


class RanksValues:
    """Keeps values that ranks log; any thread may read them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, dict[str, float]]] = {}
        self._lock = threading.Lock()

    def put(self, rank: int, message: Logged) -> None:
        """A rank has logged values; a restarted one adds to those of its predecessor, within the same bounds."""
        with self._lock:
            _, values = self._found.get(rank, (0, {}))
            values |= {name[:LONGEST]: value for name, value in message.values.items()}
            for name in [*values][: max(0, len(values) - MOST)]:
                del values[name]
            self._found[rank] = message.step, values

    def by_rank(self) -> dict[int, tuple[int, dict[str, float]]]:
        """The step and the values of each rank."""
        with self._lock:
            return {rank: (step, dict(values)) for rank, (step, values) in self._found.items()}
