"""Requests of users for a frequency, as tables."""

import re
from datetime import timedelta

import pytest

from fastckpt._core.policy.frequency.intervals import LONGEST, Fixed
from fastckpt._core.policy.frequency.requested import AUTO, RequestedIntervals, parse
from fastckpt.errors import ConfigError
from tests.support.tables import for_each

MINUTE = timedelta(minutes=1)


@for_each(
    ("auto", AUTO),
    (100, RequestedIntervals(100, 100)),
    ({}, AUTO),
    ({"memory": 10, "storage": "auto"}, RequestedIntervals(10, None)),
    ({"memory": MINUTE, "storage": 2 * MINUTE}, RequestedIntervals(MINUTE, 2 * MINUTE)),
)
def test_each_form_of_every_is_parsed(every, expected):
    assert parse(every) == expected


@for_each(
    (0, "every is 0 steps; give 1 to 1000000000"),
    (LONGEST + 1, "every is 1000000001 steps"),
    (2.5, "every is 2.5; give 'auto'"),
    ("10min", "every is '10min'; give 'auto'"),
    (timedelta(0), "every is 0:00:00; give a time above 0"),
    ({"disk": 5}, "every has 'disk'; it may have 'memory' and 'storage'"),
    ({"memory": 0}, "every['memory'] is 0 steps"),
    ({"memory": 10, "storage": 25}, "give storage a multiple of memory, such as 30"),
    ({"memory": 2 * MINUTE, "storage": MINUTE}, "give memory 0:01:00 or less"),
)
def test_invalid_values_of_every_are_refused(every, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(every)


@for_each(
    (AUTO, 0.5, Fixed(None, None, 3)),
    (RequestedIntervals(100, 100), 0.5, Fixed(100, 100, 3)),
    (RequestedIntervals(MINUTE, MINUTE), 0.7, Fixed(86, 86, 3)),
    (RequestedIntervals(MINUTE, MINUTE), 1000.0, Fixed(1, 1, 3)),
    (RequestedIntervals(MINUTE, MINUTE), 1e-9, Fixed(LONGEST, LONGEST, 3)),
    (RequestedIntervals(7, MINUTE), 0.5, Fixed(7, 126, 3)),
    (RequestedIntervals(MINUTE, 100), 1.3, Fixed(25, 100, 3)),
    (RequestedIntervals(MINUTE, 97), 1.3, Fixed(1, 97, 3)),
    (RequestedIntervals(MINUTE, 2 * MINUTE), 0.7, Fixed(86, 172, 3)),
)
def test_requested_times_become_numbers_of_steps(every, iteration, fixed):
    assert every.fixed(iteration, 3) == fixed
    assert every.automatic is (every != RequestedIntervals(100, 100))
