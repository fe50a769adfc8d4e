"""Pages of the site that are no file of docs/: mkdocs.yml names this file as a hook, and `make site` runs it.

- The README is the first page; CONTRIBUTING, CHANGELOG and the note on result files are pages too.
- Python names, options of commands, names for extensions, and ops are written from the code.
- A link of docs/ to a file outside of docs/ leads to its page, to REPOSITORY if that is set, or becomes plain text.
"""

import inspect
import os.path
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = "index.md"
MOVED = {  # files outside of docs/, and their pages
    "README.md": HOME,
    "CONTRIBUTING.md": "develop/contributing.md",
    "CHANGELOG.md": "develop/changes.md",
    "benchmarks/results/README.md": "results/files.md",
}
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SECTION = re.compile(r"^(Args|Returns|Launches|Paper|Raises):[ \t]*", re.M)


# ---------------------------------------------------------------- links


def relinked(text: str, origin: str, page: str, repository: str = "") -> str:
    """Markdown of the file `origin` as the text of a page. Both are relative: to the checkout, and to docs/."""
    parts = FENCED.split(text)
    parts[::2] = [LINK.sub(lambda m: _link(m, origin, page, repository), part) for part in parts[::2]]
    return "".join(parts)


def _link(found: re.Match, origin: str, page: str, repository: str) -> str:
    picture, text, target = found.groups()
    path, hash_, anchor = target.partition("#")
    if not path or "://" in path:
        return found[0]
    file = os.path.normpath(os.path.join(os.path.dirname(origin), path))
    inside = file.removeprefix("docs/") if file.startswith("docs/") else MOVED.get(file)
    if inside is not None:
        return f"{picture}[{text}]({os.path.relpath(inside, os.path.dirname(page) or '.')}{hash_}{anchor})"
    return f"[{text}]({repository.rstrip('/')}/blob/main/{file}{hash_}{anchor})" if repository else text


# ---------------------------------------------------------------- pages


def home() -> str:
    """The README, whose last section gives way to the table of docs/index.md."""
    readme = (ROOT / "README.md").read_text().split("\n## More\n")[0]
    rows = re.findall(r"^\|.*$", (ROOT / "docs" / HOME).read_text(), re.M)
    return relinked(readme, "README.md", HOME) + "\n## Where to read on\n\n" + "\n".join(rows) + "\n"


PUBLIC = {  # public names, where they are defined, and the members that users call
    "patch": ("torchsparsekv.api.patch", ()),
    "methods": ("torchsparsekv.api.methods", ()),
    "HyperParameter": ("torchsparsekv.method.HyperParameter", ()),
    "Handle": ("torchsparsekv.patches._handle.Handle", ("active", "make_cache", "fork", "plan", "report", "unpatch")),
    "Memory": ("torchsparsekv.patches._plan.Memory", ("host_bytes", "device_bytes")),
    "SparseCache": (
        "torchsparsekv.patches._cache.SparseCache", ("__init__", "crop", "reset", "handle", "nbytes"),
    ),
    "Report": ("torchsparsekv.report.Report", ("as_dict", "warnings")),
    "LayerReport": ("torchsparsekv.report.LayerReport", ("density", "hit_rate")),
    "use_kernels": ("torchsparsekv.ops._machinery.chain.use_kernels", ()),
    "check_method": ("torchsparsekv.check.check_method", ()),
    "probe": ("torchsparsekv.probe.probe", ()),
}  # fmt: skip


def documented(name: str, path: str, members: Iterable[str] = ()) -> str:
    """The lines that mkdocstrings replaces by signature and docstring."""
    return f"::: {path}\n    options:\n      heading: {name}\n      toc_label: {name}\n      members: {list(members)}\n"


def python() -> str:
    intro = (
        "# Python names\n\nThe public names of `torchsparsekv`, from their docstrings. `HyperParameter`, `Memory` and "
        "`LayerReport` are what calls return; `probe` is in `torchsparsekv.probe`. [API](api.md) has them in tables.\n"
    )
    return "\n".join([intro, *(documented(name, *where) for name, where in PUBLIC.items())])


def extension() -> str:
    """The names of torchsparsekv.extension, each from the module that defines it."""
    from torchsparsekv import extension as names

    every: dict[str, Any] = {n: getattr(names, n) for n in names.__all__}
    defined = {n: x for n, x in every.items() if isinstance(x, type | types.FunctionType)}
    others = [f"`{n}`" for n in every if n not in defined]
    out = [
        "# Names for extensions\n\nWhat methods and ops import from `torchsparsekv.extension`. "
        "[Write a method](method.md) and [write an op](op.md) use them.\n",
        f"{', '.join(others)}: see [the signature of an op](op.md#the-signature).\n",
    ]
    for name, x in defined.items():
        if hasattr(x, "_fields"):  # a view
            out += [f"## {name}\n", f"`{name}({', '.join(x._fields)})`\n", as_markdown(x.__doc__ or "")]
        else:
            out.append(documented(name, f"{x.__module__}.{x.__qualname__}", _hooks(x) if name == "Method" else ()))
    return "\n".join(out)


def _hooks(method: type) -> list[str]:
    return [n for n, x in vars(method).items() if not n.startswith("_") and getattr(x, "__doc__", None)]


def ops() -> str:
    """Every op by its folder, as its file describes it."""
    from torchsparsekv.ops._machinery.registry import load_all

    folders: dict[str, list[tuple[str, Any, Any]]] = {}
    for name, entry in sorted(load_all().items()):
        module = sys.modules[entry.reference.__module__]
        folders.setdefault(module.__name__.split(".")[2], []).append((name, module, entry))
    out = [
        "# Ops\n\nEvery op of `torch.ops.torchsparsekv`, from its file. [One decode step](../concepts/decode-step.md) "
        "shows where they run; [write an op](op.md) explains the words.\n"
    ]
    shared = ("store", "index", "select", "gather", "attend", "rest")
    for folder in [*shared, *sorted(folders.keys() - set(shared))]:
        out.append(f"## {folder}\n")
        for name, module, entry in folders[folder]:
            parameters = ", ".join(p.name for p in entry.signature.parameters)
            out.append(f"### {name}\n\n`{name}({parameters})` in `{module.__name__}`\n")
            texts = dict.fromkeys((module.__doc__ or "", entry.reference.__doc__ or ""))
            out += [as_markdown(text) for text in texts if SECTION.search(inspect.cleandoc(text))]
    return "\n".join(out)


def as_markdown(text: str) -> str:
    """A docstring of an op or a view: formulas are code, arguments and fields are lists, sections have bold names."""
    first, *rest = SECTION.split(inspect.cleandoc(text))
    out = [_body(first)]
    for name, body in zip(rest[::2], rest[1::2]):
        inner = _body(textwrap.dedent(body).strip("\n"), items=name == "Args")
        out.append(f"**{name}**\n\n{inner}" if inner.startswith(("- ", "```")) else f"**{name}:** {inner}")
    return "\n".join(out)


FIELD = re.compile(r"^(\w+(?:, \w+)*)(?=: | \[|$)")


def _body(text: str, items: bool = False) -> str:
    """Paragraphs as they are, indented lines as code, and lines of `name: meaning` as a list."""
    groups: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines():
        kind, lines = groups[-1]
        begins = items or not lines or kind == "list" or lines[-1].endswith((":", "."))
        if not line.strip():
            groups.append(("", []))
        elif line.startswith("    "):
            opens = not kind or (kind == "text" and lines[-1].endswith(":"))
            groups.append(("code", [line])) if opens else lines.append(line if kind == "code" else line.strip())
        elif FIELD.match(line) and begins and (items or ": " in line):
            groups.append(("list", [line]))
        elif kind == "text" or (items and kind == "list"):
            lines.append(line)
        else:
            groups.append(("text", [line]))
    said = [(kind, _group(kind, lines)) for kind, lines in groups if kind]
    return "\n".join(f"{x}" if kind == "list" == after else f"{x}\n" for (kind, x), (after, _) in _pairs(said))


def _pairs(said: list[tuple[str, str]]) -> Iterable:
    return zip(said, [*said[1:], ("", "")])


def _group(kind: str, lines: list[str]) -> str:
    if kind == "code":
        return "\n".join(["```text", textwrap.dedent("\n".join(lines)), "```"])
    if kind == "list":
        return "- " + FIELD.sub(r"`\1`", " ".join(line.strip() for line in lines))
    return "\n".join(lines).replace("::", ":")


def commands() -> str:
    """Help and options of every command, as `--help` has them."""
    import typer

    from torchsparsekv.commands import app

    out = ["# Options of commands\n\nThe help of every command. [Command line](cli.md) has examples.\n"]
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        if not command.hidden:
            out += _command(f"torchsparsekv {name}", command, 2)
    return "\n".join(out)


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    command = command.real() if hasattr(command, "real") else command  # one that is imported when it is called
    yield f"{'#' * level} {name}\n"
    yield re.sub(r"\n[ \t]+", "\n", (command.help or "").strip()) + "\n"
    for inner, x in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {inner}", x, level + 1)
    rows = [_option(p) for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if rows:
        yield "\n".join(["| argument | default | meaning |", "| --- | --- | --- |", *rows]) + "\n"


def _option(p: Any) -> str:
    names = ", ".join(f"`{o}`" for o in (*p.opts, *p.secondary_opts)) if p.opts[0].startswith("-") else f"`{p.name}`"
    default = "required" if p.required else "-" if p.default in (None, (), [], "") else f"`{p.default}`"
    meaning = " ".join((getattr(p, "help", "") or "").split())
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (names, default, meaning)) + " |"


MADE: dict[str, Callable[[], str]] = {
    "reference/python.md": python,
    "reference/commands.md": commands,
    "develop/extension.md": extension,
    "develop/ops.md": ops,
}


# ---------------------------------------------------------------- what mkdocs calls


def method_pages() -> dict[str, str]:
    """The page of every method, in the order of their table."""
    table = (ROOT / "docs/methods/index.md").read_text()
    return {name: f"methods/{name}.md" for name in re.findall(r"^\| \[`(\w+)`\]\(\1\.md\)", table, re.M)}


def on_config(config: Any) -> Any:
    for section in config.nav:
        if "Methods" in section:
            section["Methods"] += [{name: page} for name, page in method_pages().items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for file, page in MOVED.items():
        if page != HOME:
            files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if uri == HOME:
        page.meta["hide"] = ["navigation"]
        return home()
    origin = next((file for file, moved in MOVED.items() if moved == uri), f"docs/{uri}")
    return relinked(markdown, origin, uri, config.repo_url or "")
