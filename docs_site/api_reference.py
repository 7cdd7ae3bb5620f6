"""Makes docs/reference/api.md from the docstrings of all that users import."""

import re
import textwrap
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
_OF_DCP, _OF_LIGHTNING = "DCP calls its other methods.", "Lightning calls its other methods."
_OF_DATA = "Checkpointers call `state_dict`, `load_state_dict`, `rank_state_dict` and `load_rank_state_dict`."
_STATES = "load_rank_state_dict load_state_dict rank_state_dict state_dict"
_STRATEGY = (
    "load_checkpoint on_train_start on_validation_end process_dataloader remove_checkpoint save_checkpoint setup "
    "setup_environment"
)
CALLED_BY = {
    "SharedMemoryReader": (_OF_DCP, "prepare_local_plan read_data read_metadata reset set_up_storage_reader"),
    "SharedMemoryWriter": (
        _OF_DCP,
        "finish prepare_global_plan prepare_local_plan reset set_up_storage_writer storage_meta validate_checkpoint_id "
        "write_data",
    ),
    "SharedMemoryStager": (_OF_DCP, "stage synchronize_staging"),
    "FastCheckpointIO": (_OF_LIGHTNING, "overlap_with remove_checkpoint teardown"),
    "FastDDPStrategy": ("", _STRATEGY),
    "FastSingleDeviceStrategy": ("", _STRATEGY),
    "MemoryCheckpoint": ("", "after_validation on_train_batch_end on_train_start"),
    "ResumableDataLoader": (_OF_DATA, _STATES),
    "ResumableSampler": (_OF_DATA, _STATES),
}
"""Methods that a framework or a checkpointer calls, by class, and a sentence about them: users need not know them."""
HEAD = """\
# Python API

All that a script imports from `fastckpt`, made from the docstrings by `make docs-reference`. Arguments after `*` are given by name. Names with
an underscore, and `fastckpt._core`, may change with any release.
"""
_WIDTH = 100


def document() -> str:
    """The text of the page."""
    return _Page().text()


class _Page:
    """The page, while it is made."""

    def __init__(self) -> None:
        self._homes = _homes()
        self._shown: dict[str, str] = {}
        """Heading under which each function is described, by its path."""

    def text(self) -> str:
        """The text of the page."""
        index = "\n".join(
            f"- [`{module}`](#{_anchor(module)}): {_first_sentence(sources.module(module))}" for module in MODULES
        )
        parts = [HEAD, index, *(text for module in MODULES for text in self._module(module))]
        return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

    def _module(self, module: str) -> Iterator[str]:
        yield f"## {module}"
        yield _after_first_sentence(_plain(sources.module(module).docstring))
        names = [name for name in sources.exported(module) if name != "metrics"]
        homes = {name: self._homes[sources.find(f"{module}.{name}").path] for name in names}
        if module == "fastckpt":
            elsewhere = [name for name in names if homes[name] != module]
            yield f"Also here: {', '.join(f'[`{name}`](#{_anchor(name)})' for name in elsewhere)}."
        own = [(name, sources.find(f"{module}.{name}")) for name in names if homes[name] == module]
        if module == "fastckpt.errors":
            yield "Each is a `FastckptError`; [errors](../errors.md) lists causes and remedies."
            yield "\n".join(_error(name, found) for name, found in own if isinstance(found, griffe.Class))
            return
        for name, found in own:
            yield from self._object(name, found)
        if module == "fastckpt":
            home, name = METRICS
            yield from self._object(f"metrics.{name}", sources.find(f"{home}.{name}"))

    def _object(self, name: str, found: griffe.Object) -> Iterator[str]:
        yield f"### {name}"
        if isinstance(found, griffe.Class):
            yield from self._class(name, found)
        elif isinstance(found, griffe.Function):
            yield _signature(found.name, found)
            yield from _docstring(found, found)
        else:
            yield f"`{found.name} = {_quoted(getattr(found, 'value', ''))}`"
            yield from _docstring(found)

    def _class(self, name: str, cls: griffe.Class) -> Iterator[str]:
        made = sources.initializer(cls)
        public = [base for base in sources.bases(cls) if base.path in self._homes]
        is_inherited = made is not None and any(made.parent is base for base in public)
        if made is not None and not is_inherited:
            yield _signature(name, made, skip=1)
        ours = [each.path for each in sources.bases(cls)]
        above = [f"`{base}`" for base in cls.bases if _path(base) not in ours and not _path(base).startswith("abc.")]
        above += [f"[`{base.name}`](#{_anchor(base.name)})" for base in public[:1]]
        if above:
            yield f"Inherits from {', '.join(above)}."
        yield from _docstring(cls, made)
        if made is not None and made.has_docstring and not is_inherited:
            yield from _docstring(made, made)
        yield from self._members(name, cls)

    def _members(self, name: str, cls: griffe.Class) -> Iterator[str]:
        sentence, called = CALLED_BY.get(name, ("", ""))
        attributes, inherited = [], []
        for member_name, member in sources.public_members(cls).items():
            if not isinstance(member, griffe.Function):
                attributes.append(f"- `{member_name}`{_annotation(member)}: {_joined(_plain(member.docstring))}")
            elif member_name in called.split():
                continue
            elif heading := self._heading_of(cls, member):
                inherited.append(f"[`{member_name}`](#{_anchor(heading)})")
            else:
                heading = self._shown[member.path] = f"{name}.{member_name}"
                yield f"#### {heading}"
                yield _signature(member_name, member, skip=0 if "staticmethod" in member.labels else 1)
                yield from _docstring(member, member)
        if attributes:
            yield "Attributes:"
            yield "\n".join(attributes)
        if inherited:
            yield f"Inherited: {', '.join(inherited)}."
        yield sentence

    def _heading_of(self, cls: griffe.Class, member: griffe.Function) -> str:
        """The heading that describes an inherited method; empty if none does yet."""
        if member.parent is cls:
            return ""
        public = [base.path for base in sources.bases(cls) if base.path in self._homes]
        return next(
            (
                self._shown[each]
                for each in (member.path, *(f"{base}.{member.name}" for base in public))
                if each in self._shown
            ),
            "",
        )


def _homes() -> dict[str, str]:
    """Return the module whose section has an object, by its path: the most particular one that exports it."""
    found: dict[str, str] = {}
    for module in [*MODULES][1:]:
        for name in sources.exported(module):
            found.setdefault(sources.find(f"{module}.{name}").path, module)
    return found


def _error(name: str, cls: griffe.Class) -> str:
    above = ", ".join(f"`{base}`" for base in cls.bases if str(base) != "FastckptError")
    above = f" ({above})" if above else ""
    own = [f" `{key}`: {_joined(_plain(each.docstring))}" for key, each in cls.members.items() if _is_attribute(each)]
    return f"- `{name}`{above}: {_joined(_plain(cls.docstring))}{''.join(own)}"


def _is_attribute(member: griffe.Object | griffe.Alias) -> bool:
    return isinstance(member, griffe.Attribute) and member.has_docstring and not member.name.startswith("_")


def _path(base: griffe.Expr | str) -> str:
    return base if isinstance(base, str) else base.canonical_path


def _annotation(member: griffe.Object) -> str:
    kind = getattr(member, "annotation", None)
    return f" ({kind})" if kind is not None else ""


def _signature(name: str, function: griffe.Function, skip: int = 0) -> str:
    """A call with all arguments and defaults, in lines of a screen; the types are in the list of arguments."""
    given, kinds = [], griffe.ParameterKind
    starred = False
    for each in [*function.parameters][skip:]:
        if each.kind is kinds.keyword_only and not starred:
            given.append("*")
        starred |= each.kind in (kinds.keyword_only, kinds.var_positional)
        mark = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "")
        default = f"={_quoted(each.default)}" if each.default is not None and not mark else ""
        given.append(f"{mark}{each.name}{default}")
    returned = f" -> {function.returns}" if str(function.returns or None) != "None" else ""
    line = f"{name}({', '.join(given)}){returned}"
    if len(line) <= _WIDTH:
        return f"`{line}`"
    lines = textwrap.wrap(", ".join(given), _WIDTH - 4, break_on_hyphens=False)
    line = f"{name}(\n" + "".join(f"    {each}\n" for each in lines) + f"){returned}"
    return f"```python\n{line}\n```"


def _quoted(value: griffe.Expr | str | None) -> str:
    """A value as the sources write it: griffe gives it the quotes of Python's repr."""
    return str(value).replace("'", '"')


def _docstring(found: griffe.Object, function: griffe.Function | None = None) -> Iterator[str]:
    types = {each.name: _type(each) for each in function.parameters} if function else {}
    for section in found.docstring.parsed if found.docstring else ():
        if isinstance(section, griffe.DocstringSectionText):
            yield _paragraphs(section.value)
        elif isinstance(section, griffe.DocstringSectionParameters | griffe.DocstringSectionAttributes):
            is_called = isinstance(section, griffe.DocstringSectionParameters)
            yield "" if is_called else "Attributes:"
            rows = (
                (each.name, types.get(each.name, "") if is_called else "", _joined(each.description))
                for each in section.value
            )
            yield "\n".join(f"- `{name}`{kind}: {description}" for name, kind, description in rows)
        elif isinstance(section, griffe.DocstringSectionRaises):
            raised = [f"{_names(each.annotation)}: {_joined(each.description)}" for each in section.value]
            yield f"Raises {raised[0]}" if len(raised) == 1 else "Raises:"
            yield "\n".join(f"- {each}" for each in raised if len(raised) > 1)
        elif isinstance(section, griffe.DocstringSectionReturns | griffe.DocstringSectionYields):
            yield f"Returns: {' '.join(_joined(each.description) for each in section.value)}"
        else:
            raise ValueError(f"{found.path}: a docstring has a section of kind {section.kind}")


def _names(annotation: griffe.Expr | str | None) -> str:
    """The names of errors; several are written as a tuple."""
    return ", ".join(f"`{name}`" for name in str(annotation).strip("()").split(", "))


def _type(parameter: griffe.Parameter) -> str:
    """The type of an argument, without the names of modules; none if the default shows it."""
    default = str(parameter.default)
    if parameter.annotation is None or re.fullmatch(r"True|False|[\d.]+|'\w+'", default):
        return ""
    text = str(parameter.annotation).replace("str | os.PathLike[str]", "path").replace("str | Path", "path")
    text = re.sub(r"\[[^|\]]*,[^|\]]*\]", "", text)  # dict[str, Any] is a dict
    kinds = [kind for kind in re.sub(r"\b[a-z]\w*\.(?=\w)", "", text).split(" | ") if kind != "None"]
    return f" ({' | '.join(kinds)})" if kinds not in ([], ["Any"], ["object"]) else ""


def _plain(docstring: griffe.Docstring | None) -> str:
    return _paragraphs(docstring.value) if docstring else ""


def _paragraphs(text: str) -> str:
    """Docstrings write code in two backticks, and names of the project in one: Markdown takes both for code."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    return sources.linked_pages(text)


def _joined(text: str) -> str:
    return " ".join(_paragraphs(text).split())


def _first_sentence(module: griffe.Module) -> str:
    return _joined(_plain(module.docstring).partition("\n\n")[0])


def _after_first_sentence(text: str) -> str:
    """The rest of a module's docstring: the index has the first sentence."""
    return text.partition("\n\n")[2]


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as code hosts and the site make it."""
    return heading.lower().replace(".", "")
