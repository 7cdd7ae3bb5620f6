"""Pictures of docs/concepts.md: made by scripts, from the log of a real failure."""

from docs_site.pictures import concepts, failure

ROOT = failure.ROOT


def test_the_picture_of_the_failure_is_drawn_from_its_recorded_log():
    assert failure.draw(failure.load()) == failure.PICTURE.read_text()
    assert concepts.draw() == concepts.PICTURE.read_text()


def test_the_page_has_the_times_of_the_recorded_log():
    text = " ".join((ROOT / "docs/concepts.md").read_text().split())
    for at, _, what, event in failure.story(failure.Failure(failure.load())):
        assert not event or f"{at:.0f} ms" in text, (at, what)
