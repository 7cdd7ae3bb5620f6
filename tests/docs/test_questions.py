"""Questions of new users (questions.yaml): the pages that are to answer them are there, with the headings named."""

from pathlib import Path

import pytest
import yaml

from tests.test_links import ROOT, anchors

QUESTIONS = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
WITHOUT = 7
"""Questions without a page yet; only to become fewer."""


@pytest.mark.parametrize("asked", QUESTIONS, ids=lambda asked: asked["question"][:50])
def test_the_pages_that_answer_a_question_are_there_and_two_at_most(asked: dict):
    pages = asked.get("pages", [])
    assert len({page.partition("#")[0] for page in pages}) <= 2
    for page, _, anchor in (each.partition("#") for each in pages):
        assert (ROOT / page).is_file(), page
        assert not anchor or anchor in anchors(ROOT / page), f"{page} has no heading #{anchor}"


def test_few_questions_have_no_page():
    assert len(QUESTIONS) == 40
    assert sum("pages" not in each for each in QUESTIONS) == WITHOUT
