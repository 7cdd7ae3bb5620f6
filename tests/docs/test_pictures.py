"""Pictures of docs/concepts.md: made by scripts, of words and events that there are, from the log of a real failure."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import concepts, failure, scale
from tests.unit._core.report.schema import faults, table

ROOT = failure.ROOT


def test_the_picture_of_the_failure_is_drawn_from_its_recorded_log():
    assert failure.draw(failure.load()) == failure.PICTURE.read_text()


def test_the_picture_of_the_concepts_is_drawn_by_its_script():
    assert concepts.draw() == concepts.PICTURE.read_text()


def test_the_picture_of_simulated_jobs_is_drawn_from_their_recorded_figures():
    assert scale.draw(scale.load()) == scale.PICTURE.read_text()


def test_events_of_the_recorded_log_are_as_documented_and_in_order():
    events = failure.load()
    assert not [fault for event in events if event["event"] != "killed" for fault in faults(event)]
    story = failure.story(failure.Failure(events))
    assert {event for *_, event in story if event} <= table().keys()
    assert [at for at, *_ in story] == sorted(at for at, *_ in story) and len(story) == 7


def test_the_page_has_the_times_of_the_recorded_log():
    text = " ".join((ROOT / "docs/concepts.md").read_text().split())
    for at, _, what, event in failure.story(failure.Failure(failure.load())):
        assert not event or f"{at:.0f} ms" in text, (at, what)


@pytest.mark.parametrize("picture", [failure.PICTURE, concepts.PICTURE, scale.PICTURE], ids=lambda path: path.stem)
def test_a_picture_is_readable_in_light_and_dark_without_a_network(picture):
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    assert root.find("{*}title") is not None and "prefers-color-scheme: dark" in text and "system-ui" in text
    assert not re.search(r"(?<!xmlns=\")https?://|@import|url\(", text)
    light, dark = (set(re.findall(r"\.(\w+) \{[^}]*(?:fill|stroke): #", part)) for part in text.split("@media"))
    assert len(light) > 8 and light == dark
