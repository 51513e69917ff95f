"""`composer report`: one HTML file about a chain of runs that needs no other file, and its JSON twin.

document.py  - the runs of a chain, and what there is to tell about them: the twin
charts.py    - marks in rows of bars, training curves as SVG, numbers as text
page.html.j2 - the page
"""

import base64
from collections.abc import Sequence
from pathlib import Path

from composer_cli.printing import visible
from composer_cli.report import charts
from composer_cli.report.document import chain, gather
from composer_cli.show.runs import name
from stages.runs import store
from stages.runs.run import Run

__all__ = ["chain", "write"]

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write(root: Path, chain: Sequence[Run]) -> Path:
    """Write the page and its twin below `root/report`; returns the page's path."""
    import jinja2

    about = gather(chain)
    # Figures are on the page alone, by run and name; its JSON twin has their numbers.
    images = {
        (name(run.path), figure): base64.b64encode(run.read_file(f"{figure}.png") or b"").decode()
        for run in chain
        for figure in run.manifest.summary.get("figures", [])
    }
    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= charts.FORMATS
    page = environment.get_template(TEMPLATE.name).render(about=about, charts=charts, images=images)
    path = root / "report" / f"{about['name']}.html"
    store.write_json(path.with_suffix(".json"), about)
    # What models wrote may hold characters that turn the direction of a page's text, or that no file can encode.
    store.write_sealed(path, visible(page).encode())
    return path
