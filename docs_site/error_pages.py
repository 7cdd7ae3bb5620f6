"""Makes docs/errors.md from the pages of the codes (fastckpt/_core/error_codes.toml)."""

from fastckpt._core.error_codes import ErrorPage, read_pages

_HEAD = """\
# Messages with a code

Some messages end with a code, such as `(FC-030, docs/errors.md#fc-030)`. Exceptions have it as `error.code`.
`fastckpt explain FC-030` prints a page of a code without a network.

`<...>` stands for what differs, and `...` at the end of a line for the rest of a message.

This page is made from `fastckpt/_core/error_codes.toml` by `make docs-reference`.

"""


def document() -> str:
    """The text of docs/errors.md."""
    pages = read_pages().values()
    rows = "".join(f"- [{page.code}](#{page.code.lower()}): {page.title}\n" for page in pages)
    return _HEAD + rows + "".join(map(_section, pages))


def _section(page: ErrorPage) -> str:
    messages = "\n".join(page.messages) or "(no message any more)"
    remedies = "\n".join(f"{number}. {each}" for number, each in enumerate(page.remedies, start=1))
    return f"""
## {page.code}

**{page.title}**

```text
{messages}
```

{page.cause}

{remedies}

Lost: {page.lost[0].lower()}{page.lost[1:]}
"""
