"""The language of the house: docstrings' first words, and words that the project does not use."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for top in ("fastckpt", "fastckpt_run") for path in (ROOT / top).rglob("*.py"))
PROGRAMS = sorted(path for top in ("docs_site", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

QUESTIONS = re.compile(r"(?i)(what|how|which|who|whom|whose|where|when|whether|why)$")
FRAGMENTS = re.compile(r"(?i)(those|it|they|as|at|by|of|for|in|to|from|since|until|nobody|nothing)$")
BANNED = {
    r"behind (the )?training": "in the background, overlapped with training",
    r"behind everybody's back": "concurrently",
    r"anew": "again",
    r"heed(s|ed|ing)?": "apply",
    r"wish(es|ed)?": "option, request",
    r"drives? out|driven out": "evict",
    r"takes? leave": "deregister",
    r"sets? aside|setting aside": "stage (memory), quarantine (files)",
    r"trainings": "training runs, jobs",
    r"languages of others": "native formats",
    r"at hand": "available",
    r"what stands still": "tensors that must not be mutated while they are copied",
    r"(second|durable) levels?": "tier",
}
"""What is not written, and what is written instead."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    first, count = [], 0
    for path in SOURCES + PROGRAMS:
        for opening in re.finditer(r'^ *"""[^\w\n]*([A-Za-z\']+).*', path.read_text(), re.MULTILINE):
            count += 1
            if QUESTIONS.match(opening[1]) or FRAGMENTS.match(opening[1]):
                first.append(f"{name_of(path)}: {opening[0]}")
    assert not first
    assert count > 5000


def test_banned_words_are_not_used() -> None:
    pages = [path for path in SOURCES + PAGES if path.name != "glossary.md"]  # that says what others call a thing
    assert len(pages) > 500
    banned, hits = re.compile(rf"\b(?:{'|'.join(BANNED)})\b"), []
    for path in pages:
        text = " ".join(line.strip().lstrip("#") for line in path.read_text().lower().splitlines())
        hits += [f"{name_of(path)}: {found.group()}" for found in banned.finditer(text)]
    assert not hits, BANNED
