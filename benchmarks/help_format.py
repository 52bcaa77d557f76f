"""Help texts from docstrings: paragraphs wrap at the terminal width, indented commands stay as written."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that wraps each paragraph of a description and keeps paragraphs that begin with a space."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(
            paragraph if paragraph.startswith(" ") else super(HelpFormatter, self)._fill_text(paragraph, width, indent)
            for paragraph in paragraphs
        )
