"""Tables of pure functions: one test for all rows, since each test of its own costs ten times what such a row does."""

import inspect
from collections.abc import Callable
from typing import Any


def for_each(*rows: Any) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Call a test with each row, or each value if it takes one; a row may begin with a name that the test lacks."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        count = len(inspect.signature(test).parameters)

        def table() -> None:
            assert rows
            for row in rows:
                try:
                    test(*([row] if count == 1 else row[len(row) - count :]))
                except BaseException as error:
                    error.add_note(f"the row is {row}")
                    raise

        table.__name__, table.__doc__, table.__module__ = test.__name__, test.__doc__, test.__module__
        return table

    return decorate
