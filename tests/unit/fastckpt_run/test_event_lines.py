"""Lines of events in memory, most of them compressed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastckpt_run.events import event_lines
from fastckpt_run.events.event_lines import EventLines


@given(st.integers(0, 40), st.integers(-3, 45), st.one_of(st.none(), st.integers(-3, 45)))
def test_they_are_read_as_a_list_of_them(count, first, end):
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(event_lines, "PACKED", 4)
        lines, known = EventLines(), [f'{{"event": {number}}}\n'.encode() for number in range(count)]
        for line in known:
            lines.append(line)
        assert (len(lines), [*lines], lines[first:end]) == (count, known, known[first:end])
        assert [lines[at] for at in range(-count, count)] == [known[at] for at in range(-count, count)]
