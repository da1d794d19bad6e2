"""index.html: the whole report in one file that needs no network."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from harness.report.curves import LeftOut, Picture
from harness.report.record import Run
from harness.report.runs import Skipped

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ content.title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
figure { margin: 2rem 0; } img { max-width: 100%; height: auto; border: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { border: 1px solid #ddd; padding: .25rem .5rem; text-align: left; } th { background: #f4f4f4; }
tr.bad td { background: #fbe9e0; } .facts { color: #444; font-size: 13px; }
</style>
</head>
<body>
<h1>{{ content.title }}</h1>
{% for fact in content.facts %}<p class="facts">{{ fact }}</p>
{% endfor %}
<p>Also in this folder: <a href="table.csv">table.csv</a> (every run), <a href="table.md">table.md</a>, each picture as
PNG and SVG.</p>
{% for picture in content.pictures %}<figure id="{{ picture.slug }}">
<img alt="{{ picture.title }}" src="data:image/png;base64,{{ image(picture) }}">
<figcaption class="facts">{{ picture.title }} (<a href="{{ picture.slug }}.png">PNG</a>,
<a href="{{ picture.slug }}.svg">SVG</a>)</figcaption>
</figure>
{% endfor %}
{% if content.left_out %}<h2>Left out</h2>
<ul>
{% for each in content.left_out %}<li>{{ each.title }}: {{ each.why }}</li>
{% endfor %}</ul>{% endif %}
<h2>Points</h2>
<div class="wide"><table>
<tr>{% for key in content.rows[0] %}<th>{{ key }}</th>{% endfor %}</tr>
{% for row in content.rows %}<tr{% if row.status != "completed" and not row.status.endswith(" completed") or "," in row.status %} class="bad"{% endif %}>
{%- for value in row.values() %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% if content.failures %}<h2>Runs that did not complete</h2>
<div class="wide"><table><tr><th>run</th><th>status</th><th>reason</th></tr>
{% for run in content.failures %}<tr><td>{{ run.study }}/{{ run.name }}</td><td>{{ run.status }}</td><td>{{ run.reason }}</td></tr>
{% endfor %}</table></div>{% endif %}
{% if content.skipped %}<h2>Not read</h2>
<ul>
{% for each in content.skipped %}<li>{{ each }}</li>
{% endfor %}</ul>{% endif %}
</body>
</html>
"""


@dataclass
class Content:
    """What stands on the page, in its order."""

    title: str
    facts: list[str]
    pictures: list[Picture]
    left_out: list[LeftOut]
    rows: list[dict[str, str]]
    failures: list[Run]
    skipped: list[Skipped]


def render(content: Content, folder: Path) -> str:
    """The page, with the PNG files of ``folder`` inside."""
    import jinja2

    def image(picture: Picture) -> str:
        return base64.b64encode((folder / f"{picture.slug}.png").read_bytes()).decode()

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(content=content, image=image)
