"""`composer show`: print a submitted job, a run, or one rollout, as text or JSON."""

import sys
from pathlib import Path

import typer

from composer_cli.executors import jobs
from composer_cli.executors.jobs import SubmittedJob
from composer_cli.printing import interrupt_leaves, print_json, print_result, print_text, say, views
from composer_cli.show import facts, rollout as rollouts, runs, text
from composer_cli.show.follow import follow
from composer_stages import STAGES
from composer_stages.errors import BadInput, UsageError
from composer_stages.evaluation import task_rates
from composer_stages.evaluation.task_rates import TaskCount
from composer_stages.runs import catalog, queries
from composer_stages.runs.queries import RolloutFilter
from composer_stages.runs.run import Run
from composer_stages.words import Sentence

WATCHED = "Only the watching has ended; what was watched goes on."


def find(root: Path, name: str) -> Path | SubmittedJob:
    """Return the job of this name, or the run that it means; else the job of which it is a part."""
    if (job := jobs.find(root, name, part=False)) is not None:
        return job
    try:
        return catalog.find(root, name)
    except BadInput:
        if (job := jobs.find(root, name)) is None:
            raise
        return job


def watch(target: Path | SubmittedJob) -> None:
    """Print the log of a job as it grows, or what happens inside a run, until it ends."""
    with interrupt_leaves(WATCHED):
        if isinstance(target, SubmittedJob):
            for line in jobs.log(target, follow=True):
                print_text(line)
                sys.stdout.flush()
        else:
            with views() as draw:
                follow(target, draw)


def print_job(job: SubmittedJob, *, json: bool) -> None:
    """Print a job with its log."""
    job = jobs.refresh_job(job)
    print_json({"job": job, "log": list(jobs.log(job, follow=False))}) if json else print_text(jobs.page(job))


def open_run(folder: Path, name: str, *, json: bool) -> Run:
    """Return the run of a folder.

    name: as the user called it. A newer run of the same stage that is not complete is mentioned. Of a damaged run the
    facts are printed, since its manifest is intact, and the command ends.
    """
    if name in STAGES and (newer := catalog.unfinished_since(folder.resolve())) is not None:
        this = catalog.name(folder.resolve())
        finished = any(not unit.get("failed") for unit in newer.units())
        say(
            Sentence(
                "cli.newer-run",
                newer=catalog.name(newer.path),
                status=newer.manifest.status,
                finished=finished,
                this=this,
            )
        )
    run = Run(folder)
    if damage := runs.damage(run, "tables"):
        print_result(
            json, {"manifest": run.manifest.model_dump(), "damage": damage}, text.facts_page(run, damaged=True)
        )
        say(f"{run.path}: {damage}. {runs.REPAIR}")
        raise typer.Exit(BadInput.exit_code)
    return run


def print_rollout(run: Run, part: str, *, full: bool, json: bool) -> None:
    """Print the rollout with this id, or part of an id."""
    rollout = rollouts.find(run, part)
    if json:
        print_json(rollout.as_json())
    else:
        print_text(text.transcript_text(run.path, rollout, full=full), bold_titles=True)


def print_run(run: Run, name: str, chosen: RolloutFilter, number: int | None, *, json: bool) -> None:
    """Print a run with the list of its rollouts, or the first rows of its tables.

    name: as the user called it. number: rollouts or rows that are listed; None for as many as usual.
    """
    page = queries.page(run, chosen, size=text.NUMBER if number is None else number)
    manifest = run.manifest.model_dump()
    if page is None and chosen.reward:
        raise UsageError("cli.no-rollouts-to-filter", run=run.path, reward=chosen.reward)
    if page is None:
        rows = 1 if number is None else number
        if json:
            print_json({"manifest": manifest, "rows": facts.first_rows(run, rows)})
        else:
            print_text(text.run_page(run, text.rows_text(run, rows)))
    elif json:
        counts = {"outcomes": page.outcomes, "passes": page.passes, "fitting": page.total}
        print_json({"manifest": manifest, **counts, "rollouts": page.rows})
    else:
        rates = (
            "" if chosen != RolloutFilter() else task_rates.table([TaskCount(*row) for row in queries.task_counts(run)])
        )
        listed = "\n\n".join(filter(None, [rates, text.index_text(page, chosen, name)]))
        print_text(text.run_page(run, listed, page), text.OUTCOME_COLOURS)
