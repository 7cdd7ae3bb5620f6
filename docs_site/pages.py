"""The pages of the documentation that are generated, and what makes each."""

from collections.abc import Callable, Mapping

from docs_site import api_reference, command_reference, error_pages, option_reference
from fastckpt._core import error_codes

PAGES: Mapping[str, Callable[[], str]] = {
    error_codes.PAGE: error_pages.document,
    "docs/reference/api.md": api_reference.document,
    "docs/reference/cli.md": command_reference.document,
    "docs/reference/launcher.md": option_reference.document,
}
