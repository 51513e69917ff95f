"""`composer report`: one HTML file about a chain of runs that needs nothing beside it, and its JSON twin.

lineage.py - which runs belong together
compared.py - what was compared: model, environment, arms, command
facts.py - what there is to say about them, JSON-able: the twin
probe.py - what the gradient probe found, its figures
examples.py - the transcripts worth reading
charts.py - where marks lie in a chart
page.html.j2 - the page
"""

from collections.abc import Sequence
from pathlib import Path

from composer_cli.printing import visible
from composer_cli.report import charts, facts
from composer_cli.report.facts import images
from stages.runs import store
from stages.runs.artifact import Run

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write(root: Path, chain: Sequence[Run]) -> Path:
    """Write the page and its twin below `root/report`; returns the page's path."""
    import jinja2

    about = facts.gather(chain)
    loader = jinja2.FileSystemLoader(TEMPLATE.parent)
    environment = jinja2.Environment(autoescape=True, loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= charts.FORMATS
    page = environment.get_template(TEMPLATE.name).render(about=about, charts=charts, images=images(chain))
    path = root / "report" / f"{about['name']}.html"
    store.write_json(path.with_suffix(".json"), about)
    store.write_sealed(path, visible(page).encode())
    return path
