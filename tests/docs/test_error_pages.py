"""The pages of the codes: each code of the product has one with its messages, and docs/errors.md shows it."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from docs_site.error_pages import document
from fastckpt._core.error_codes import PAGE, code_of, coded, read_pages
from fastckpt.errors import ArenaTooSmall, FastckptError
from tests.support.syntax import tree_of

ROOT = Path(__file__).parents[2]
PAGES = read_pages().values()
SOURCES = sorted([*ROOT.glob("fastckpt/**/*.py"), *ROOT.glob("fastckpt_run/**/*.py")])
LAST_OF_0_3 = 44
"""The last code of the first release that had any: codes up to this one mean the same for ever."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def trees() -> dict[str, ast.Module]:
    return {module_name(path): tree_of(path) for path in SOURCES}


def text_of(node: ast.AST) -> str:
    """A literal with a mark where something is put in, by an f-string or by logging; empty if it is no literal."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%(?:\.\d)?[a-z]", "<>", node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "<>" for each in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp):
        return f"{text_of(node.left) or '<>'}{text_of(node.right) or '<>'}"
    return ""


def shown(message: str) -> str:
    """A message of a page as `text_of` gives it; of some the page has the beginning only."""
    return re.sub(r"[.:,;]* \.\.\.$", "", re.sub(r"<[^<>]*>", "<>", message))


def plain(text: str) -> str:
    """A text without what is put in, and without what stands between two such places alone."""
    return re.sub(r"\W*(<>\W*)+", "<>", " ".join(text.split()))


@cache
def calls() -> dict[str, list[tuple[str, str]]]:
    """By code: the modules that end a message with it, and the message if it is a literal."""
    found = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "coded":
                text, code = node.args
                assert isinstance(code, ast.Constant), f"{module}:{node.lineno}: give the code as a literal"
                found[code.value].append((module, text_of(text)))
    return found


def test_numbers_are_consecutive_so_that_none_is_used_again():
    assert [page.code for page in PAGES] == [f"FC-{number:03d}" for number in range(1, len(PAGES) + 1)]
    assert len(PAGES) >= LAST_OF_0_3
    assert len({page.title for page in PAGES}) == len(PAGES)


def test_codes_of_the_product_have_pages_with_its_messages():
    # One test, as sources are parsed once: with xdist each test may be another process.
    assert sorted(calls()) == [page.code for page in PAGES if page.messages]
    literals = [plain(text) for tree in trees().values() for node in ast.walk(tree) if len(text := text_of(node)) > 12]
    for page in PAGES:
        messages = [plain(shown(message)) for message in page.messages]
        coded_with = [plain(text) for _, text in calls().get(page.code, []) if text.strip("<>")]
        lacking = [text for text in coded_with if not any(message in text for message in messages)]
        assert lacking == [], f"{page.code} does not show these"
        unknown = [message for message in messages if not any(message in text for text in literals)]
        assert unknown == [], f"{page.code} shows these, and nothing in the product has them"


def test_the_documented_pages_are_those_of_the_table():
    text = (ROOT / PAGE).read_text()
    assert text == document(), "make docs-reference"
    assert re.findall(r"^## (FC-\d{3})$", text, re.MULTILINE) == [page.code for page in PAGES]


def test_an_error_has_the_code_with_which_its_message_ends():
    text = coded("too small", "FC-001")
    assert text == "too small (FC-001, docs/errors.md#fc-001)"
    assert ArenaTooSmall(text).code == "FC-001" and FastckptError("odd").code == ""
    outer = coded(f"not durable: {text}. Again", "FC-025")
    assert code_of(outer) == "FC-025" and code_of(f"in memory only ({text}). It is kept") == "FC-001"
    assert code_of("FC-001, or docs/errors.md#fc-001") == ""


def test_remedies_name_options_and_commands_that_there_are():
    from fastckpt_run.cli import main
    from fastckpt_run.options import LauncherParser

    text = document()
    assert set(re.findall(r"--fast-[a-z-]+", text)) <= set(LauncherParser().ours)
    words = set(re.findall(r"`fastckpt ([a-z]+)", text))
    assert len(words) > 5 and words <= set(main.commands)
