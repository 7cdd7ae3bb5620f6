"""Questions of new users (questions.yaml): pages and headings that answer them are there, two clicks from the index."""

import re
from pathlib import Path

import yaml

from tests.test_links import ROOT, anchors

QUESTIONS = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
INDEX = ROOT / "docs/index.md"


def linked_from(page: Path) -> set[Path]:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    return {(page.parent / link).resolve() for link in links if link.endswith(".md")}


def test_the_pages_that_answer_a_question_are_there_and_two_at_most():
    for asked in QUESTIONS:
        pages = [page.partition("#") for page in asked["pages"]]
        assert 1 <= len({page for page, *_ in pages}) <= 2, asked
        for page, _, anchor in pages:
            assert (ROOT / page).is_file(), page
            assert not anchor or anchor in anchors(ROOT / page), f"{page} has no heading #{anchor}"


def test_a_page_that_answers_a_question_is_two_clicks_from_the_index_at_most():
    first = linked_from(INDEX)
    second = {each for page in first for each in linked_from(page)}
    answers = {ROOT / page.partition("#")[0] for asked in QUESTIONS for page in asked["pages"]}
    assert not answers - first - second
