"""Sphinx configuration of the documentation site. Build it with `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*)", re.MULTILINE)
PAGE_LINK = re.compile(r"\[([^\]]+)\]\(([\w/.-]+)\.md\)")

project = "megatron_llama"
author = "The megatron_llama authors"
extensions = ["myst_parser"]
exclude_patterns = ["_static"]
myst_heading_anchors = 4  # GitHub's anchors
highlight_language = "text"  # blocks without a language are commands and their output

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_copyright = False


def add_toctrees(app: Sphinx, page: str, source: list[str]) -> None:
    """Add a hidden toctree to each section of index.md, with the pages that the section links to.

    GitHub does not render toctrees; the lists of links in index.md are the only place that orders the pages.
    """
    if page == "index":
        source[0] = SECTION.sub(_with_toctree, source[0])


def _with_toctree(section: re.Match[str]) -> str:
    entries = "".join(f"{title} <{target}>\n" for title, target in PAGE_LINK.findall(section[2]))
    return f"{section[0]}\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{entries}```\n\n"


def unlink_files_outside_docs(app: Sphinx, document: nodes.document) -> None:
    """Replace links to files outside the site by their text. tests/test_docs.py checks them."""
    folder = DOCS / Path(app.env.docname).parent
    for link in [*document.findall(addnodes.pending_xref), *document.findall(addnodes.download_reference)]:
        if not (folder / link["reftarget"]).resolve().is_relative_to(DOCS):
            link.replace_self(link.children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers."""
    app.connect("source-read", add_toctrees)
    app.connect("doctree-read", unlink_files_outside_docs)
    return {"parallel_read_safe": True}
