"""A comparison as one HTML page that needs nothing else: no script, no other file, no network."""

from __future__ import annotations

import base64

from megatron_llama.tools.compare.comparison_plot import NARROW, WIDE, draw
from megatron_llama.tools.compare.comparison_report import how, notes, rows, verdict
from megatron_llama.tools.compare.verdict import Comparison

# The browser takes the picture that fits the screen's width and the reader's light or dark theme.
PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Training curves: {{ runs | map(attribute="name") | join(" and ") }}</title>
<style>
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 60rem; padding: 1.25rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; border-left: .35rem solid {{ "#15803d" if agree else "#b91c1c" }}; padding-left: .75rem; }
img { width: 100%; }
div { overflow-x: auto; } td, th { text-align: left; padding: .2rem 1.2rem .2rem 0; white-space: nowrap; }
</style>
<h1>{{ verdict }}</h1>
<p>{{ how }}</p>
<picture>
{%- for media, png in pictures.items() %}
<source media="{{ media }}" srcset="data:image/png;base64,{{ png }}">
{%- endfor %}
<img src="data:image/png;base64,{{ picture }}"
alt="Above, the loss over consumed samples, smoothed; below, the relative gap and the band that it may stay in.">
</picture>
<div><table>
<tr><th>{% for run in runs %}<th>{{ run.name }}{% endfor %}
<tr><td>log{% for run in runs %}<td>{{ run.program }}:<br>{{ run.source }}{% endfor %}
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}{% endfor %}
{% endfor %}</table></div>
<ul>{% for note in notes %}<li>{{ note }}{% endfor %}</ul>
</html>
"""


def as_html(comparison: Comparison) -> str:
    """The report as a page for wide and narrow screens, light and dark."""
    import jinja2  # torch requires it

    def png(inches: tuple[float, float] = WIDE, dark: bool = False) -> str:
        return base64.b64encode(draw(comparison, inches, dark)).decode("ascii")

    narrow, dark = "(max-width: 600px)", "(prefers-color-scheme: dark)"
    pictures = {
        f"{narrow} and {dark}": png(NARROW, dark=True),
        narrow: png(NARROW),
        dark: png(dark=True),
    }
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(PAGE)
    return template.render(
        agree=comparison.agree,
        verdict=verdict(comparison),
        how=how(comparison),
        pictures=pictures,
        picture=png(),
        runs=[comparison.reference, *(one.run for one in comparison.compared)],
        rows=rows(comparison),
        notes=list(notes(comparison)),
    )
