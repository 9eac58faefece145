"""What mkdocs does not do by itself: text taken from the sources and a word for each missing docstring.

A page may hold these lines, which are replaced by what the sources say, read without importing them:

    {{ docstring shardcore.hooks }}     the docstring of a module, as Markdown
    {{ words shardcore.styles }}        a table of the public functions of a module: how each is called, what it does
    {{ names shardcore.nn }}            a table of everything in ``__all__`` of a module: the name, what it is
    [PATH](../PATH)                     a file of the repository, as a block of code; Markdown without its title
    {{ titles adr }}                    a list of the pages of a folder of docs/, by their titles
    {{ version shardcore }}             the version of a distribution of the repository
    {{ served MODELS.md }}              the families of classes that the packs of that page serve
"""

from __future__ import annotations

import ast
import logging
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "shardcore" / "src"

# A warning of this logger is an error of `mkdocs build --strict`.
log = logging.getLogger("mkdocs.plugins.shardcore")

_DIRECTIVE = re.compile(r"^\{\{ (\w+) ([^{}]+) \}\}$", re.MULTILINE)
_FILE = re.compile(r"^\[([\w./-]+)\]\((?:\.\./)+\1\)$", re.MULTILINE)
#: Ends of names of files -> how a block of code says the same.
_LANGUAGES = {".py": "python"}
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
#: The most characters of a cell, but one in the first column, that is a number or a mark and no words.
_NARROW = 12
_BREAK = re.compile(r"(?<=[a-z0-9][._])(?=\w{3})|(?<=[a-z0-9])(?=[A-Z][a-z]{2})")
_CLASS = re.compile(r"^\| `(\w+)` ", re.MULTILINE)
_FETCHED = re.compile(
    r"<(?:script|link|img|iframe)\b(?![^>]*rel=.canonical)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)
_REFERENCE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put in what the page takes from the sources, and warn of public names that have no docstring."""
    for name in _REFERENCE.findall(markdown):
        if not documented(name):
            log.warning("%s: %s has no docstring", page.file.src_uri, name)
    return expand(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Say of each table whether its columns may be narrow, for ``tables.css``, and where its names may be broken."""
    return _TABLE.sub(lambda table: f'<div class="{_kind(table[0])}">{_breakable(table[0])}</div>', html)


def on_post_build(*, config: Any) -> None:
    """Warn of what a page that is opened from a folder, without a network, would lack: scripts, styles, the search."""
    site = Path(config["site_dir"])
    for page in site.rglob("*.html"):
        for tag in _FETCHED.findall(page.read_text(encoding="utf-8")):
            log.warning("%s fetches %s", page.relative_to(site), tag)
    for needed in ("search/search_index.js", "js/iframe-worker.js"):
        if not (site / needed).is_file():
            log.warning("%s is not in the site: pages from a folder have no search", needed)


on_post_build.mkdocs_priority = -200  # type: ignore[attr-defined]  # after the plugin that writes the index


def _kind(table: str) -> str:
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)]
    cells = [re.sub(r"<[^>]+>", "", cell) for row in rows for cell in row[1:]]
    return "narrow" if all(len(cell) <= _NARROW for cell in cells) else "wide"


def _breakable(table: str) -> str:
    """Let names in code break after dots and underscores and between words; a bar needs no backslash any more."""
    return re.sub(r"<code>(.*?)</code>", lambda code: _BREAK.sub("<wbr>", code[0]).replace("\\|", "|"), table)


def expand(markdown: str) -> str:
    """Replace every directive of a page, and every file that is named on a line of its own."""
    found = _DIRECTIVE.sub(lambda match: _KINDS[match[1]](*match[2].split()), markdown)
    return _FILE.sub(lambda match: file(match[1]), found)


def tree(module: str) -> ast.Module:
    """Parse a module of shardcore by its dotted name."""
    root, *rest = module.split(".")
    source = SOURCE if root == SOURCE.parent.name else next(ROOT.glob(f"*/{root.replace('_', '-')}/src"))
    path = source.joinpath(root, *rest)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def as_markdown(module: str) -> str:
    """Return the docstring of a module, with code of list items indented as Markdown wants it, and trees as lists."""
    text = ast.get_docstring(tree(module)) or ""
    text = re.sub(r"^ {7}(?=\S| )", " " * 8, text, flags=re.MULTILINE)
    return re.sub(r"^.+\n(?:[├│└].*(?:\n|$))+", _as_list, text, flags=re.MULTILINE)


def _as_list(tree: re.Match[str]) -> str:
    """Return a drawn tree, of lines "name (base)   what it is", as a list of lists."""
    lines = re.findall(r"^([│├└─ ]*)(\w+)( \(\w+\))? *(.*)$", tree[0], re.MULTILINE)
    items = (f"{' ' * len(drawn)}* `{name}`{base}{said and ': '}{said}" for drawn, name, base, said in lines)
    return "\n".join(items) + "\n"


def file(path: str) -> str:
    """Return a file of the repository in a block of code, or Markdown without its title.

    Of the links of Markdown those to pages of the site stay.
    """
    language = _LANGUAGES.get(Path(path).suffix, Path(path).suffix[1:])
    if language != "md":
        return f"```{language}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"
    text = re.sub(r"\A# .*\n+", "", (ROOT / path).read_text(encoding="utf-8")).rstrip()
    return re.sub(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)", lambda link: _link(*link.groups()), text)


def _link(text: str, target: str) -> str:
    return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text


def titles(folder: str) -> str:
    """Return a Markdown list of the pages of a folder of docs/, by their titles."""
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    first = [page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for page in pages]
    return "\n".join(f"* [{title}]({folder}/{page.name})" for title, page in zip(first, pages, strict=True))


def served(path: str) -> str:
    """Return the families that the packs in the page of models serve, with links to their tables."""
    sections = re.split(r"^## (.+)\n", (ROOT / path).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    packs = {pack: _CLASS.findall(rows) for pack, rows in zip(sections[::2], sections[1::2], strict=True)}
    return " ·\n".join(f"[{', '.join(families(names))}](models.md#{pack})" for pack, names in packs.items())


def families(classes: Sequence[str]) -> list[str]:
    """Return what the names of base models begin with; all names where none of them is called a model."""
    bare = [re.sub(r"(Text|Vision|Encoder|QFormer|LMHead|DoubleHeads|MT)?Model$", "", name) for name in classes]
    return list(dict.fromkeys(short for short, name in zip(bare, classes, strict=True) if short != name)) or bare


def version(folder: str) -> str:
    """Return the version of the distribution in a folder of the repository."""
    return str(tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def words(module: str) -> str:
    """Return a Markdown table of the public functions of a module, in the order of the file; imported ones last."""
    parsed = tree(module)
    sources = [node.module for node in parsed.body if isinstance(node, ast.ImportFrom) and node.module]
    ours = [tree(source) for source in sources if source.startswith("shardcore.")]
    rows = [
        f"| `{node.name}` | `{_call(node)}` | {_summary(node)} |"
        for node in (node for body in (parsed, *ours) for node in body.body)
        if isinstance(node, ast.FunctionDef) and node.name in public(parsed)
    ]
    return "\n".join(["| word | call | what it says |", "|---|---|---|", *rows])


def names(module: str) -> str:
    """Return a Markdown table of the public names of a module and the first sentences of their docstrings."""
    rows = [f"| `{name}` | {_said_of(module, name)} |" for name in public(tree(module))]
    return "\n".join(["| name | what it is |", "|---|---|", *rows])


def _said_of(module: str, name: str) -> str:
    """Return the summary of a class or function where it is defined; nothing for other values."""
    body = tree(module).body
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _summary(node)
    for node in (node for node in ast.walk(ast.Module(body=body, type_ignores=[])) if isinstance(node, ast.ImportFrom)):
        if node.module and node.module.startswith("shardcore"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _said_of(node.module, alias.name)
    return ""


def _call(node: ast.FunctionDef) -> str:
    """Return how a function is called, without annotations."""
    arguments = ast.unparse(node.args)
    bare = ast.parse(f"def f({arguments}): ...").body[0]
    assert isinstance(bare, ast.FunctionDef)  # what was just written
    every = [*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs]
    for argument in [*every, *filter(None, (bare.args.vararg, bare.args.kwarg))]:
        argument.annotation = None
    return f"{node.name}({ast.unparse(bare.args)})".replace("|", "\\|")


def _summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def public(module: ast.Module) -> list[str]:
    """Return the names in ``__all__``."""
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def documented(name: str) -> bool:
    """Tell whether a name that a reference page shows has a docstring, or is an alias or a value."""
    module, _, short = name.rpartition(".")
    try:
        body = tree(module).body
    except (FileNotFoundError, NotADirectoryError):
        return True  # a module itself, or a name that mkdocstrings will not find either
    for statement in reversed(body):  # overloads stand before the function
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == short:
            return bool(ast.get_docstring(statement))
    for node in ast.walk(ast.Module(body=body, type_ignores=[])):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if (alias.asname or alias.name) == short and node.module.startswith("shardcore"):
                    return documented(f"{node.module}.{alias.name}")
    return True


_KINDS: dict[str, Callable[..., str]] = {
    "docstring": as_markdown,
    "words": words,
    "names": names,
    "titles": titles,
    "served": served,
    "version": version,
}
