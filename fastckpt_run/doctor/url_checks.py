"""Check of a store at a URL: whether it can be opened, listed, and written to."""

from collections.abc import Iterator
from contextlib import closing
from secrets import token_hex

from fastckpt._core.storage.local.layout import PRIVATE
from fastckpt._core.storage.store import normalised, open_store
from fastckpt_run.doctor.diagnosis import Diagnosis, Subject, ok, problem, warning


def store(subject: Subject) -> Iterator[Diagnosis]:
    """List it, and write, read and remove one small object."""
    # Imported here: fsspec, and the client of the store.
    from fastckpt._core.storage.remote.client_errors import ExplainedErrors
    from fastckpt._core.storage.remote.objects import Objects

    location = normalised(subject.directory)
    with closing(open_store(location)) as opened:
        count = len(opened.checkpoints())
        excludes = opened.histories.excludes
    yield ok("store", f"{location} can be listed: {count} whole checkpoints")
    name, data = f"{PRIVATE}/doctor-{token_hex(8)}", token_hex(16).encode()
    with closing(Objects(location)) as objects, ExplainedErrors("write a trial object", objects.url()):
        objects.put(name, data)
        try:
            found = objects.read(name, 2 * len(data))
        finally:
            objects.remove(name)
    if found == data:
        yield ok("store", "a small object could be written, read and removed")
    else:
        yield problem(
            "store", "a small object is another when it is read again", "Use another store, or ask who runs it"
        )
    if excludes:
        yield ok("store", "it decides which of two jobs came first")
    else:
        remedy = "Use a store that knows If-None-Match (AWS S3 does), or accept that with --fast-no-exclusive"
        yield warning("store", "two jobs that save there cannot be told apart", remedy)
