"""Writes the generated pages of the documentation: `make docs-reference`."""

from docs_site.pages import PAGES
from docs_site.sources import ROOT

for name, document in PAGES.items():
    (ROOT / name).write_text(document())
