"""Makes docs/reference/api.md from the docstrings of all that users import."""

import re
from collections.abc import Iterator

import griffe

from docs_site import sources

MODULES = {
    "fastckpt": "fastckpt",
    "fastckpt.ddp": "fastckpt.ddp",
    "fastckpt.checkpointer": "fastckpt.checkpointer",
    "fastckpt.fsdp": "fastckpt.fsdp",
    "fastckpt.dcp": "fastckpt.dcp",
    "fastckpt.deepspeed": "fastckpt.deepspeed",
    "fastckpt.huggingface": "fastckpt.huggingface",
    "fastckpt.lightning": "fastckpt.lightning",
    "fastckpt.accelerate": "fastckpt.accelerate",
    "fastckpt.data": "fastckpt.data",
    "fastckpt.offload": "fastckpt.offload",
    "fastckpt.errors": "fastckpt.errors",
}
METRICS = ("fastckpt._core.metrics", "log")
"""Module that is public as `fastckpt.metrics`, and the function of it that users call."""
HEAD = """\
# Python API

All that a script imports from `fastckpt`, made from the docstrings by `make docs-reference`. Arguments after `*` are given by name.
What begins with an underscore, and the package `fastckpt._core`, may change with any release.
"""
_WIDTH = 100


def document() -> str:
    """The text of the page."""
    homes = _homes()
    index = "\n".join(
        f"- [`{module}`](#{_anchor(module)}): {_first_sentence(sources.module(module))}" for module in MODULES
    )
    parts = [HEAD, index, *(text for module in MODULES for text in _module(module, homes))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _homes() -> dict[str, str]:
    """Map the path of an object to the module whose section has it, the most particular that exports it."""
    found: dict[str, str] = {}
    for module in [*MODULES][1:]:
        for name in sources.exported(module):
            found.setdefault(sources.find(f"{module}.{name}").path, module)
    return found


def _module(module: str, homes: dict[str, str]) -> Iterator[str]:
    yield f"## {module}"
    yield _plain(sources.module(module).docstring)
    names = [name for name in sources.exported(module) if name != "metrics"]
    elsewhere = {name: home for name in names if (home := homes[sources.find(f"{module}.{name}").path]) != module}
    if elsewhere:
        links = (f"[`{name}`](#{_anchor(name)})" for name in elsewhere)
        yield f"Also here: {', '.join(links)}."
    for name in names:
        if name not in elsewhere:
            yield from _object(name, sources.find(f"{module}.{name}"))
    if module == "fastckpt":
        home, name = METRICS
        yield from _object(f"metrics.{name}", sources.find(f"{home}.{name}"))


def _object(name: str, found: griffe.Object) -> Iterator[str]:
    yield f"### {name}"
    if isinstance(found, griffe.Class):
        yield from _class(name, found)
    elif isinstance(found, griffe.Function):
        yield _signature(found.name, found)
        yield from _docstring(found)
    else:
        yield f"```python\n{found.name} = {_quoted(getattr(found, 'value', ''))}\n```"
        yield from _docstring(found)


def _class(name: str, cls: griffe.Class) -> Iterator[str]:
    made = sources.initializer(cls)
    above = ", ".join(f"`{base}`" for base in cls.bases if not _is_internal(base))
    if made is not None and not _is_error(cls):
        yield _signature(name, made, skip=1)
    if above:
        yield f"Inherits from {above}."
    yield from _docstring(cls)
    if made is not None and made.has_docstring:
        yield from _docstring(made)
    attributes = []
    for member_name, member in sources.public_members(cls).items():
        if _is_error(cls) and member.parent is not cls:
            continue
        if isinstance(member, griffe.Function):
            yield f"#### {name}.{member_name}"
            yield _signature(member_name, member, skip=0 if "staticmethod" in member.labels else 1)
            yield from _docstring(member)
        else:
            attributes.append(f"- `{member_name}`{_annotation(member)}: {_joined(_plain(member.docstring))}")
    if attributes:
        yield f"Attributes of `{name}`:"
        yield "\n".join(attributes)


def _is_internal(base: griffe.Expr | str) -> bool:
    path = base if isinstance(base, str) else base.canonical_path
    return path.startswith(("fastckpt._core.", "abc."))


def _is_error(cls: griffe.Class) -> bool:
    return cls.path.startswith("fastckpt.errors.")


def _annotation(member: griffe.Object) -> str:
    kind = getattr(member, "annotation", None)
    return f" ({kind})" if kind is not None else ""


def _signature(name: str, function: griffe.Function, skip: int = 0) -> str:
    """A call with all arguments, one in each line if they are many."""
    given, kinds = [], griffe.ParameterKind
    starred = False
    for each in [*function.parameters][skip:]:
        if each.kind is kinds.keyword_only and not starred:
            given.append("*")
        starred |= each.kind in (kinds.keyword_only, kinds.var_positional)
        mark = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "")
        kind = f": {each.annotation}" if each.annotation is not None else ""
        default = f" = {_quoted(each.default)}" if each.default is not None and not mark else ""
        given.append(f"{mark}{each.name}{kind}{default}")
    returned = f" -> {function.returns}" if function.returns is not None and function.name != "__init__" else ""
    line = f"{name}({', '.join(given)}){returned}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in given) + f"){returned}"
    return f"```python\n{line}\n```"


def _quoted(value: griffe.Expr | str | None) -> str:
    """A value as the sources write it: griffe gives it the quotes of Python's repr."""
    return str(value).replace("'", '"')


def _docstring(found: griffe.Object) -> Iterator[str]:
    for section in found.docstring.parsed if found.docstring else ():
        if isinstance(section, griffe.DocstringSectionText):
            yield _paragraphs(section.value)
        elif isinstance(section, griffe.DocstringSectionParameters | griffe.DocstringSectionAttributes):
            yield "\n".join(f"- `{each.name}`: {_joined(each.description)}" for each in section.value)
        elif isinstance(section, griffe.DocstringSectionRaises):
            yield "\n".join(f"- raises `{each.annotation}`: {_joined(each.description)}" for each in section.value)
        elif isinstance(section, griffe.DocstringSectionReturns | griffe.DocstringSectionYields):
            yield "\n".join(f"Returns: {_joined(each.description)}" for each in section.value)
        else:
            raise ValueError(f"{found.path}: a docstring has a section of kind {section.kind}")


def _plain(docstring: griffe.Docstring | None) -> str:
    return _paragraphs(docstring.value) if docstring else ""


def _paragraphs(text: str) -> str:
    """Docstrings write code in two backticks, and names of the project in one: Markdown takes both for code."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return re.sub(r"\bdocs/([\w/]+\.md)", r"[\1](../\1)", text)


def _joined(text: str) -> str:
    return " ".join(_paragraphs(text).split())


def _first_sentence(module: griffe.Module) -> str:
    return _joined(_plain(module.docstring).partition("\n\n")[0])


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as code hosts and the site make it."""
    return heading.lower().replace(".", "")
