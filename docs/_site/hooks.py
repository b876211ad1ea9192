"""What the site adds to docs/: README as its home page, further files of the tree, and links that fit.

Pages link to each other as they do in the tree, where most readers meet them. On the site docs/ is the root.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/: pages of the root, and the examples."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the tree into links between pages of the site."""
    return _LINK.sub(lambda link: link[1] + _site_link(page.file.src_uri, link[2]), markdown)


def _site_link(page: str, link: str) -> str:
    in_tree = {site: source for source, site in PAGES.items()}
    here = in_tree.get(page) or (page if page.startswith("examples/") else f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    target = PAGES.get(target, target.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(page) or ".")
