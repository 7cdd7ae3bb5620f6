"""Makes docs/errors.md from the pages of the codes (fastckpt/_core/error_codes.toml)."""

from fastckpt._core.error_codes import ErrorPage, read_pages

_HEAD = """\
# Messages with a code

Some messages end with a code, such as `(FC-030, docs/errors.md#fc-030)`. Exceptions have it as `error.code`.
`fastckpt explain` lists all codes; `fastckpt explain FC-030` prints the page of one, without a network.

`<...>` stands for what differs, and `...` at the end of a line for the rest of a message.

This page is made from `fastckpt/_core/error_codes.toml` by `make docs-reference`.
"""


def document() -> str:
    """The text of docs/errors.md."""
    return _HEAD + "".join(map(_section, read_pages().values()))


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
