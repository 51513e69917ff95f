"""The commands that look at runs: status, show, query, report, view."""

import sys
from typing import Annotated

import typer

from composer_cli import complete, options
from composer_cli.errors import as_sentences, say


@as_sentences
def status(
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """List all runs: what became of each, and why one is not up to date."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.show import status as about

    found = about.lines(artifacts)
    if json:
        print_json({"runs": found})
    elif found:
        print_text(about.table(found), about.COLOURS)
    else:
        say(f"There are no runs in {artifacts} yet. `composer run --preset demo` makes some.")


@as_sentences
def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder, or its name in `composer status`.", autocompletion=complete.runs
        ),
    ],
    rollout: Annotated[str | None, typer.Option("--rollout", metavar="ID", help="Only this rollout.")] = None,
    number: Annotated[int, typer.Option("-n", metavar="K", min=0, help="How many rollouts or rows.")] = 1,
    follow: Annotated[bool, typer.Option("--follow", help="Watch its episodes until it ends.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Read a run: its facts, its result, and transcripts or rows of it."""
    from composer_cli.printing import print_json, print_text, views
    from composer_cli.show import runs, show
    from composer_cli.show.follow import follow as until_it_ends
    from stages.runs.artifact import Run

    folder = runs.find(artifacts, run)
    if follow:
        with views() as draw:
            until_it_ends(folder, draw)
        return
    found = Run(folder)
    transcripts = show.choose(found, rollout, number)
    if json:
        rows = {} if transcripts else show.rows(found, number)
        print_json({"manifest": found.manifest.model_dump(), "transcripts": transcripts, "rows": rows})
    else:
        print_text(show.page(found, transcripts, number))


@as_sentences
def query(
    sql: Annotated[
        str,
        typer.Argument(metavar="SQL", help="A question, such as: select run, avg(reward) from rollouts group by run"),
    ],
    from_: options.From = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Ask the tables of all runs a question in SQL; every table has a column `run`."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.show import query
    from stages.runs import tables

    columns, rows = tables.query(query.readable(artifacts, from_ or []), sql)
    if json:
        print_json({"rows": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_text(query.table(columns, rows))


@as_sentences
def report(
    run: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Runs to report on, with all before.", autocompletion=complete.runs),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Write one HTML file about a chain of runs, the newest if none is named."""
    from composer_cli import report as reports
    from composer_cli.printing import print_json, print_text
    from composer_cli.report import lineage

    path = reports.write(artifacts, lineage.chain(artifacts, run or []))
    if json:
        print_json({"html": str(path), "json": str(path.with_suffix(".json"))})
    else:
        print_text(str(path))


@as_sentences
def view(
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, help="The port; a free one if left out.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Show all runs and rollouts on a local web page, until Ctrl-C."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.view import server

    def tell(address: str) -> None:
        print_json({"url": address}) if json else print_text(address)
        sys.stdout.flush()
        say("Open this address in a browser; nobody without it can read the pages. Ctrl-C ends it.")

    server.serve(artifacts, port, tell)
