"""Admission of a node to a running job: it is compared with the members before it costs them anything."""

import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastckpt._core.error_codes import coded
from fastckpt._core.memory.directory_claim import DirectoryClaim
from fastckpt._core.storage.local.identity import identity
from fastckpt._core.storage.store import as_path, is_url
from fastckpt.errors import ConfigError
from fastckpt_run.rendezvous.job_terms import JobTerms, Misfit, misfit
from fastckpt_run.rendezvous.membership import Node, Round
from fastckpt_run.rendezvous.round_store import RoundStore
from fastckpt_run.script_analysis import option_values

logger = logging.getLogger("fastckpt.launcher")

_WITNESSES = 16
"""Members of which a node reads the signs of life at once: it needs one that lives, and many nodes may wait."""
_FRESH = 2.0
"""Seconds after its last sign for which a member counts as alive; then others are looked at."""
_ANSWER = 20.0
"""Seconds that a directory has to answer."""


@dataclass(frozen=True)
class JobDirectory:
    """A checkpoint directory of a job, as its members know it.

    Attributes:
        path: Its path there.
        mark: Its mark, which no other directory has.
        options: The options of the script that have named it there.
    """

    path: str
    mark: str
    options: Sequence[str] = ()

    def misfit(self, arguments: Sequence[str]) -> Misfit | None:
        """Return why a node with these script arguments has another directory in its place; None if it has this one."""
        places = [each for each in _places_in(arguments) if each[0] in self.options] or [("", self.path)]
        found = [_mark_at(place) for _, place in places]
        if self.mark in found:
            return None
        (option, place), mark = places[0], found[0]
        if isinstance(mark, OSError):
            text = f"{place} cannot be read on this node: {mark.strerror}. The job has its checkpoints in {self.path}"
            return Misfit(coded(text, "FC-050"), waits=True)  # storage may answer again
        if place == self.path:
            text = f"{place} is not the checkpoint directory of the job on this node: mount there what the others have"
            return Misfit(coded(text, "FC-050"))
        text = (
            f"{option} is {place} on this node, and the job that it would join has its checkpoints in {self.path}, "
            "another directory: give all nodes the same, and another job another --rdzv-id"
        )
        return Misfit(coded(text, "FC-050"))


class NodeAdmission:
    """The comparison of this node with the members of a job, before it is one of those that these wait for.

    Members stop their workers for a node that joins, and all end if it does not fit. So it is refused before; or waits,
    if it has a newer version, until none of the members is left.

    Attributes:
        terms: Terms of this node.
        arenas: Returns the arenas of this node, by their checkpoint directories.
    """

    def __init__(self, terms: JobTerms, arguments: Sequence[str] = ()) -> None:
        """``arguments`` are those of the script."""
        self.terms, self._arguments = terms, arguments
        self.arenas: Callable[[], Mapping[str, Path]] = dict
        self._directories = dict[str, JobDirectory]()
        self._witnesses = _Witnesses()
        self._is_told = False

    def admits(self, records: RoundStore, me: Node, patience: float, last: Round) -> bool:
        """Return whether this node may come to the round after ``last`` by now.

        It may if it fits the members, or if none of them has given a sign of life for ``patience`` seconds: then there
        is nobody to fit. Raises ConfigError if a member lives that it does not fit.
        """
        if not last.nodes or me.id in last.ranks or (why := self._misfit(records, last)) is None:
            return True
        lives = self._witnesses.live(records, last, patience)
        if lives and not why.waits:
            raise ConfigError(why.text)
        if lives and not self._is_told:
            self._is_told = True
            logger.warning("%s", why.text)
        return lives is False

    def directories(self) -> list[dict[str, Any]]:
        """The newest checkpoint directory of the job, as far as this node knows it: a JSON list of one at most.

        Those before it may have been removed by the script on purpose.
        """
        for path, arena in [each for each in self.arenas().items() if not is_url(each[0])][-1:]:
            with suppress(OSError):
                mark = DirectoryClaim.read(arena).seen
                if mark and mark not in self._directories:
                    place = os.path.realpath(path)
                    options = [option for option, given in _places_in(self._arguments) if option and given == place]
                    self._directories = {mark: JobDirectory(path, mark, options)}
        return [asdict(each) for each in [*self._directories.values()]]  # another thread may add one

    def _misfit(self, records: RoundStore, last: Round) -> Misfit | None:
        if why := misfit(self.terms, last.terms):
            return why
        known = {each.mark: each for each in _read(records.first(last).get("directories"))}
        why = next(filter(None, (each.misfit(self._arguments) for each in known.values())), None)
        # Should this node become the first one, its own workers have reported nothing yet.
        self._directories |= known if why is None else {}
        return why


class _Witnesses:
    """Members of a round that are looked at for signs of life, some at a time."""

    def __init__(self) -> None:
        self._round, self._first, self._since = "", 0, 0.0
        self._beats = dict[str, int]()
        self._have_lived = False

    def live(self, records: RoundStore, last: Round, patience: float) -> bool | None:
        """Return whether a member lives; None while none has given a sign, but one may still."""
        now, gone = time.monotonic(), records.gone(last)
        if self._round != last.name:
            self._round, self._first, self._since = last.name, 0, now
            self._beats, self._have_lived = {}, False
        left = [id for id in last.ranks if id not in gone]
        if not left:
            return False
        some = [left[(self._first + each) % len(left)] for each in range(min(_WITNESSES, len(left)))]
        beats = records.beats(some)
        if any(beat > self._beats.get(id, beat) for id, beat in beats.items()):  # the first may be of one that is dead
            self._since, self._have_lived = now, True
        self._beats |= beats
        quiet = now - self._since
        if quiet > patience:
            return False
        if quiet > _FRESH:
            self._first, self._have_lived = self._first + _WITNESSES, False
        return self._have_lived or None


def _read(record: Any) -> Iterator[JobDirectory]:
    """The directories in a JSON list; entries that describe none are skipped."""
    for each in record if isinstance(record, list) else ():
        match each:
            case {"path": str(path), "mark": str(mark), "options": list(options)}:
                yield JobDirectory(path, mark, [*map(str, options)])


def _places_in(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a script, with the paths that their values would be."""
    return [(option, os.path.realpath(as_path(value))) for option, value in option_values(arguments)]


def _mark_at(place: str) -> str | OSError:
    """The mark of the directory at a path, empty if it has none; or why it cannot be read."""
    answer = queue.SimpleQueue[str | OSError]()

    def read() -> None:
        try:
            answer.put(identity(Path(place)))
        except OSError as error:
            answer.put(error)

    # In a thread, because a file server that is gone answers never.
    threading.Thread(target=read, name="fastckpt-directory", daemon=True).start()
    with suppress(queue.Empty):
        return answer.get(timeout=_ANSWER)
    return TimeoutError(errno.ETIMEDOUT, f"it has not answered for {_ANSWER:g} s")
