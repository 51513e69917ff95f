"""The commands that look at runs and submitted jobs: status, show, cancel, query, report, view."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from composer_cli import complete, options
from composer_cli.printing import as_sentences, say

if TYPE_CHECKING:
    from composer_cli.executors import jobs


@as_sentences
def status(
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """List all runs: what became of each, and why one is not up to date."""
    from composer_cli.executors import jobs
    from composer_cli.printing import print_json, print_text
    from composer_cli.show import status as about

    found, submitted = about.lines(artifacts), jobs.lines(artifacts)
    if json:
        print_json({"runs": found, "jobs": submitted})
    elif found or submitted:
        tables = [about.table(found)] if found else []
        tables += [about.jobs_table(submitted)] if submitted else []
        print_text("\n\n".join(tables), about.COLOURS)
    else:
        say(f"There are no runs in {artifacts} yet. `composer run --preset demo` makes some.")


@as_sentences
def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or its name in `composer status`; a submitted job's name.",
            autocompletion=complete.runs_and_jobs,
        ),
    ],
    rollout: Annotated[str | None, typer.Option("--rollout", metavar="ID", help="Only this rollout.")] = None,
    number: Annotated[int, typer.Option("-n", metavar="K", min=0, help="How many rollouts or rows.")] = 1,
    follow: Annotated[bool, typer.Option("--follow", help="Watch episodes, or a job's log, until it ends.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Read a run: its facts, its result, and transcripts or rows of it."""
    from composer_cli.executors import jobs
    from composer_cli.printing import print_json, print_text, views
    from composer_cli.show import runs, show
    from composer_cli.show.follow import follow as until_it_ends
    from stages.errors import BadInput
    from stages.runs.artifact import Run

    job = jobs.find(artifacts, run, part=False)
    try:
        folder = None if job else runs.find(artifacts, run)
    except BadInput:
        job = jobs.find(artifacts, run)
        if job is None:
            raise
        folder = None
    if job is not None:
        _show_job(job, follow, json)
        return
    assert folder is not None  # noqa: S101
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


def _show_job(job: "jobs.Job", follow: bool, json: bool) -> None:
    from composer_cli.executors import jobs
    from composer_cli.printing import print_json, print_text

    if follow:
        for line in jobs.log(job, follow=True):
            print_text(line)
            sys.stdout.flush()
        return
    found = jobs.asked(job)
    if json:
        print_json({"job": found, "log": list(jobs.log(found, follow=False))})
    else:
        print_text(jobs.page(found))


@as_sentences
def cancel(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Its name in `composer status`.", autocompletion=complete.jobs),
    ],
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Stop a chain that was submitted with --on; what it finished stays."""
    from composer_cli.executors import jobs
    from composer_cli.printing import print_json, print_text

    stopped = jobs.cancel(jobs.named(artifacts, job))
    print_json({"job": stopped}) if json else print_text(f"{stopped.name} is {stopped.state.status}.")


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
    from composer_cli.show.show import readable, table
    from stages.runs import queries

    columns, rows = queries.query(readable(artifacts, from_ or []), sql)
    if json:
        print_json({"rows": [dict(zip(columns, row, strict=True)) for row in rows]})
    else:
        print_text(table(columns, rows))


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
    from composer_cli.report import facts

    path = reports.write(artifacts, facts.chain(artifacts, run or []))
    if json:
        print_json({"html": str(path), "json": str(path.with_suffix(".json"))})
    else:
        print_text(str(path))


@as_sentences
def publish(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run's folder, or its name in `composer status`.", autocompletion=complete.runs
        ),
    ],
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Where to: s3://BUCKET/RUN, gs://, az://, hf:// or file:///.")
    ],
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Write a finished run into a bucket, from where `--from URL` reads it."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.show import runs
    from stages.runs import bucket
    from stages.runs.artifact import Run

    folder = runs.find(artifacts, run)
    sent = bucket.publish(Run(folder), address)
    if json:
        print_json({"run": str(folder), "url": address, "sent_bytes": sent})
    else:
        print_text(f"{address}: {f'{sent / 1e6:.1f} MB sent' if sent else 'this run is there already'}")


@as_sentences
def view(
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, help="The port; a free one if left out.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.ARTIFACTS,
) -> None:
    """Show all runs and rollouts on a local web page, until Ctrl-C."""
    from composer_cli.printing import print_json, print_text
    from composer_cli.view import app

    def tell(address: str) -> None:
        print_json({"url": address}) if json else print_text(address)
        sys.stdout.flush()
        say("Open this address in a browser; nobody without it can read the pages. Ctrl-C ends it.")

    app.serve(artifacts, port, tell)
