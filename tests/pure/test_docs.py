"""The pages in Markdown: their links and commands exist, and the API reference has every public name."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shlex
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from deep_ep.buffers.low_latency import MOST_TOKENS
from deep_ep.kernels.low_latency import words
from deep_ep.tools import cli
from deep_ep.transport import MAX_EXPERTS
from deep_ep.transport.board import MOST_LOW_LATENCY_RANKS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
MODULES = ("deep_ep", "deep_ep.moe", "deep_ep.planner", "deep_ep.launch", "deep_ep.placement")
REFERENCE = ROOT / "docs" / "reference"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", prose_of(page), re.M):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_limits_are_named() -> None:
    assert f"At most {MAX_EXPERTS:,} experts" in (ROOT / "docs/elastic.md").read_text()
    named = (ROOT / "docs/support.md").read_text().partition("## Limits")[2]
    limits = (MAX_EXPERTS, MOST_TOKENS, MOST_LOW_LATENCY_RANKS, words.MOST_RANKS)
    assert [limit for limit in limits if f"{limit:,}" not in named] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_wrapped(page: Path) -> None:
    lines = re.sub(r"\]\([^)]*\)", "", prose_of(page)).splitlines()  # no link can be
    assert [line for line in lines if len(line) > 120 and not line.lstrip().startswith(("|", "!", "<"))] == []


def test_every_page_is_on_the_site() -> None:
    """In the navigation, but single decisions, to which their own page of contents leads."""
    site = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    wanted = [str(page) for page in pages if not re.match(r"decisions/\d", str(page))]
    assert [page for page in wanted if f": {page}\n" not in site] == []
    contents = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [page.name for page in pages if re.match(r"decisions/\d", str(page)) and page.name not in contents] == []


# Commands ------------------------------------------------------------------------------------------------------------


def commands_of(page: Path) -> list[str]:
    """Calls of `python -m deep_ep` on a page, in code and in prose; those with an ellipsis are not meant literally."""
    found = re.findall(r"python -m deep_ep ([a-z][^`\n#|]*)", page.read_text())
    return [command.strip() for command in found if "..." not in command]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name_of)
def test_commands_have_their_options(page: Path) -> None:
    for arguments in map(shlex.split, commands_of(page)):
        if arguments == ["report"]:  # only named: it requires a folder
            continue
        assert cli._parser(arguments).parse_args(arguments).command == arguments[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_has_its_targets(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    blocks = "".join(re.findall(r"^```\w*$.*?^```$", page.read_text(), re.S | re.M))
    named = re.findall(r"`make ([a-z-]+)", prose_of(page)) + re.findall(r"^make ([a-z-]+)", blocks, re.M)
    assert set(named) <= targets


# Reference -----------------------------------------------------------------------------------------------------------


def public_names(module: ModuleType) -> list[str]:
    """What a module exports; without a list of it, what it defines."""
    exported = getattr(module, "__all__", None)
    if exported is not None:
        return list(exported)
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in defined if not name.startswith("_")]


@pytest.mark.parametrize("name", MODULES)
def test_the_reference_has_every_public_name(name: str) -> None:
    documented = [
        line for page in REFERENCE.glob("*.md") for line in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]
    names = [f"{name}.{public}" for public in public_names(importlib.import_module(name))]
    assert names
    assert [public for public in names if public not in documented] == []
    assert max(Counter(documented).values()) == 1


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    without = []
    for public in public_names(module):
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value):
            has_docstring = bool(vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__)
        else:
            has_docstring = public == "__version__" or has_data_docstring(public)
        if not has_docstring:
            without.append(public)
    assert without == []


def has_data_docstring(name: str) -> bool:
    """Whether an assignment to a name is followed by a string that describes it, where it is made."""
    for path in (ROOT / "src" / "deep_ep").rglob("*.py"):
        text = path.read_text()
        if re.search(rf"^{name}\b.*=", text, re.M):
            body = ast.parse(text).body
            for statement, following in itertools.pairwise(body):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and name in ast.unparse(statement).split("=")[0]:
                    return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False
