"""The commands about runs, submitted jobs and served models.

Each reads its words, asks one module for facts, and prints them as text or JSON.
"""

import sys
from dataclasses import replace
from decimal import Decimal
from typing import Annotated, Any

import typer

from composer_cli import options
from composer_cli.loopback import HOST
from composer_cli.printing import fit_to_terminal, interrupt_leaves, print_result, reports_errors, say
from composer_stages.words import Sentence


@reports_errors
def status(
    check: Annotated[
        bool, typer.Option("--check", help="Read every byte of every run, and exit with 4 if any is damaged.")
    ] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """List all runs with their status, and why one is not up to date."""
    from composer_cli.executors import jobs
    from composer_cli.show import runs
    from composer_cli.show.text import COLOURS, status_tables
    from composer_stages.errors import BadInput

    listed, submitted = runs.lines(artifacts, check="bytes" if check else "sizes"), jobs.lines(artifacts)
    if json or listed or submitted:
        print_result(
            json, {"runs": listed, "jobs": submitted}, fit_to_terminal(status_tables(listed, submitted)), COLOURS
        )
    else:
        say(Sentence("cli.no-runs-yet", artifacts=artifacts))
    damaged = [line for line in listed if line.status in (runs.DAMAGED, "unreadable")]
    if check and damaged:  # --json has told it all on stdout
        say(
            Sentence(
                "cli.runs-damaged", damaged=len(damaged), runs=len(listed), run=damaged[0].run, reason=damaged[0].reason
            )
        )
        raise typer.Exit(BadInput.exit_code)


@reports_errors
def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or its name in `composer status`; a submitted job's name.",
            autocompletion=lambda ctx: [*options.complete_runs(ctx), *options.complete_jobs(ctx)],
        ),
    ],
    rollout: Annotated[
        str | None,
        typer.Argument(
            metavar="ROLLOUT",
            help="Print this rollout: its id, or a part that no other id has.",
            autocompletion=options.complete_rollouts,
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", metavar="N", min=0, help="List N rollouts (20 if not given), or N rows of each table (1)."
        ),
    ] = None,
    passed: Annotated[bool, typer.Option("--passed", help="List only rollouts with a reward of 1 or more.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="List only rollouts with a reward below 1.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print long texts of a ROLLOUT in full.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Watch rollouts, or a job's log, until it ends.")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Read a run: its result, the list of its rollouts or rows of its tables; or one rollout."""
    from composer_cli.executors.jobs import SubmittedJob
    from composer_cli.show import command
    from composer_stages.errors import UsageError
    from composer_stages.runs.queries import RolloutFilter

    if passed and failed:
        raise UsageError("cli.passed-and-failed")
    if rollout is not None and (passed or failed or number is not None):
        raise UsageError("cli.list-options-with-rollout")
    if full and rollout is None:
        raise UsageError("cli.full-without-rollout")
    target = command.find(artifacts, run)
    if follow:
        command.watch(target)
    elif isinstance(target, SubmittedJob):
        command.print_job(target, json=json)
    else:
        opened = command.open_run(target, run, json=json)
        if rollout is not None:
            command.print_rollout(opened, rollout, full=full, json=json)
        else:
            chosen = RolloutFilter(reward="passed" if passed else "failed" if failed else "")
            command.print_run(opened, run, chosen, number, json=json)


@reports_errors
def cancel(
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="Its name in `composer status`.", autocompletion=options.complete_jobs)
    ],
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Stop a chain that was submitted with --on; what it finished stays."""
    from composer_cli.executors import jobs

    stopped = jobs.cancel(artifacts, job)
    print_result(json, {"job": stopped}, f"{stopped.name} is {stopped.state.status}.")


QUESTION_BYTES, SPARE_BYTES = 4 * 2**30, 2**28
"""Most memory of a question and of printing its answer, of which half of a machine's is enough; and of the threads."""
MEMORY = {"-d": 512, "-v": 2048}
"""MiB that a limit has to leave for DuckDB and the libraries of tables, some of which crash without a word on less."""


def _require_memory() -> None:
    """`UsageError` where a limit of this process leaves too little memory; before the libraries are loaded."""
    from composer_stages.backends import resources
    from composer_stages.errors import UsageError

    for option, free in resources.within_limits().items():
        if free < MEMORY[option] * 2**20:
            raise UsageError("cli.memory-limit-too-low", limit=option, free_mib=free / 2**20, needed_mib=MEMORY[option])


@reports_errors
def query(
    sql: Annotated[
        str,
        typer.Argument(metavar="SQL", help="A question, such as: select run, avg(reward) from rollouts group by run"),
    ],
    from_: options.From = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Ask the tables of all runs a question in SQL; every table has a column `run`."""
    _require_memory()
    from composer_cli.show.text import query_table
    from composer_stages.backends import resources
    from composer_stages.runs import catalog, index
    from composer_stages.runs.run import Run
    from composer_stages.runs.sql import PARTS, pooled, run_sql, sql_query, too_large

    entries = index.of(Run(catalog.find(artifacts, name)) for name in from_ or []) or index.entries(artifacts)
    # DuckDB does not count what a function returns, such as repeat(), and takes the machine's memory for it.
    most = min(QUESTION_BYTES, resources.available("cpu") // 2)
    try:
        with resources.limited_memory(most + SPARE_BYTES):
            columns, rows = run_sql(replace(sql_query(entries, sql), memory=most // PARTS))
            document = {"rows": [dict(zip(columns, map(_json_value, row), strict=True)) for row in rows]}
            print_result(json, document, query_table(columns, rows))
    except MemoryError:
        raise too_large(f"{most / 2**30:.3g} GB of memory for its answer") from None
    for sentence in pooled(entries, sql):
        say(sentence)


def _json_value(value: Any) -> Any:
    """Return a value of DuckDB as JSON has it: decimals as numbers, keys and integers beyond 64 bits as text."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    return [*map(_json_value, value)] if isinstance(value, list | tuple) else value


@reports_errors
def report(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs to report on, with all before.", autocompletion=options.complete_runs
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Write one HTML file about a chain of runs, the newest if none is named."""
    from composer_cli.view import page

    path = page.save(artifacts, page.chain(artifacts, run or []))
    print_result(json, {"html": str(path), "json": str(path.with_suffix(".json"))}, str(path))


@reports_errors
def publish(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run's folder, or its name in `composer status`.",
            autocompletion=options.complete_runs,
        ),
    ],
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Where to: s3://BUCKET/RUN, gs://, az://, hf:// or file:///.")
    ],
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Write a finished run into a bucket, from where `--from URL` reads it."""
    from composer_stages.runs import bucket, catalog
    from composer_stages.runs.run import Run

    folder = catalog.find(artifacts, run)
    with interrupt_leaves(Sentence("cli.publish-interrupted", address=address)):
        sent = bucket.publish(Run(folder), address)
    sentence = f"{address}: {f'{sent / 1e6:.1f} MB sent' if sent else 'this run is there already'}"
    print_result(json, {"run": str(folder), "url": address, "sent_bytes": sent}, sentence)


@reports_errors
def view(
    page: Annotated[
        str, typer.Argument(metavar="[LINK]", help="The page to open: a link that was copied from a page.")
    ] = "",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, help="The port; a free one if left out.")] = 0,
    json: options.Json = False,
    verbose: options.Verbose = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Show all runs and rollouts on a local web page, until Ctrl-C."""
    from composer_cli.view import app

    def announce(address: str) -> None:
        print_result(json, {"url": address}, address)
        sys.stdout.flush()
        say(Sentence("cli.view-address"))

    app.serve(artifacts, port, announce, app.page_of(page))


@reports_errors
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="A model folder or hub id, or a run whose checkpoint is served.")
    ],
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[
        str, typer.Option("--host", help="All but this machine's own address need a key: --set api_key_env=NAME.")
    ] = HOST,
    set_: options.Set = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    artifacts: options.Artifacts = options.DEFAULT_ARTIFACTS,
) -> None:
    """Serve a model with vLLM, or in this process where there is none, until Ctrl-C. Settings are a policy's."""
    from composer_cli import serve as serving
    from composer_cli.console import Console

    raise typer.Exit(serving.serve(model, port, set_ or [], artifacts, Console(quiet), json, host))
