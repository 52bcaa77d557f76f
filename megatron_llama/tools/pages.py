"""HTML pages of tools: templates next to the tool, and one style. Pages need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STYLE_SHEET = Path(__file__).with_name("page.css")


def render_page(template: Path, **values: Any) -> str:
    """Return the page of a jinja2 template, whose variable ``style`` is the style sheet."""
    import jinja2  # torch requires it

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = markup(STYLE_SHEET.read_text(encoding="utf-8"))
    return environment.from_string(template.read_text(encoding="utf-8")).render(style=style, **values)


def markup(text: str) -> Any:
    """Mark text as HTML that needs no escapes."""
    import markupsafe  # of jinja2

    return markupsafe.Markup(text)
