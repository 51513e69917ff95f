"""Run a preset: every entry after those it reads, what is up to date skipped, the last entry's result in the end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from composer_cli import call, parallel
from composer_cli.call import Arguments, StageJob
from composer_cli.console import Console
from composer_cli.parallel import WaitingEntry
from composer_cli.preset import Preset, PresetEntry
from composer_cli.printing import print_json, print_text
from composer_cli.view import page
from composer_stages import command_words
from composer_stages.backends import devices, resources
from composer_stages.errors import ComposerError, Incomplete, UsageError
from composer_stages.layout import aligned
from composer_stages.runs import ledger
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.run import Run
from composer_stages.runs.runner import Result, check_disk_space
from composer_stages.runs.settings import StageConfig, Tree, parts
from composer_stages.runs.stage import Plan, load_stage
from composer_stages.stopping import on_signals
from composer_stages.words import Sentence


def of_seeds(stage: str, config: StageConfig, arguments: Arguments) -> tuple[Preset, dict[str, StageConfig]]:
    """Return the runs of one stage that differ in the seed alone as a chain, whose entries may run at the same time."""
    if arguments.out is not None:
        raise UsageError("cli.seeds-into-one-folder", out=arguments.out)
    call.require_one_process(f"{command_words(stage)} --seeds")
    configs = {f"{stage}-{each.seed}": each for each in config.each_seed()}
    entries = [{"stage": stage, "name": title, "parallel": stage} for title in configs]
    return Preset.model_validate({"stage": entries, "to_the_end": True}), configs


def run(
    preset: Preset,
    configs: Mapping[str, StageConfig],
    arguments: Arguments,
    console: Console,
    inputs: Sequence[Run] = (),
) -> dict[str, Result]:
    """Return the results by title, in order; raises at the first entry that fails or, by default, judges itself not ok.

    Also at one that leaves open whether it is (exit code 3), where a later entry reads it.

    Entries of a group run in processes of their own where they do not need the same workers or server. inputs: runs
    that every entry reads besides those of other entries.
    """

    def job(entry: PresetEntry, results: Mapping[str, Result]) -> StageJob:
        return job_of(preset, entry, configs[entry.title], results, inputs)

    read = {name for entry in preset.stage for name in entry.reads}

    def require(title: str, result: Result) -> None:
        outcome = Run(result.path).manifest.outcome
        if preset.to_the_end:
            return
        if outcome.ok is False:
            raise ComposerError("cli.checks-not-passed", title=title, run=result.path)
        if outcome.exit_code == Incomplete.exit_code and title in read:
            raise Incomplete("cli.verdict-open", title=title, verdict=outcome.summary.get("verdict"), run=result.path)

    _check_gpus(preset, configs, arguments.on)
    results: dict[str, Result] = {}
    with on_signals(console.announce_stop):
        for group in preset.groups():
            if can_run_in_parallel([configs[entry.title] for entry in group], arguments):
                own_options = with_money_left(arguments, results)
                waiting = [
                    WaitingEntry(
                        entry.title, entry.stage, entry.reads, entry.gpus_for(configs[entry.title]), partial(job, entry)
                    )
                    for entry in group
                ]
                results |= parallel.execute(waiting, results, own_options, console, require)
                continue
            for entry in group:
                own_options = with_money_left(arguments, results)
                own_options = own_options.model_copy(update={"on": arguments.on or entry.on or None})
                results[entry.title] = call.execute(job(entry, results), own_options, console)
                require(entry.title, results[entry.title])
    return results


def with_money_left(arguments: Arguments, results: Mapping[str, Result]) -> Arguments:
    """Return the arguments with what the entries so far left of the chain's budget, by their ledgers."""
    if arguments.max_cost is None:
        return arguments
    spent = sum(sum(ledger.totals(result.path) or ()) for result in results.values())
    return arguments.model_copy(update={"max_cost": max(arguments.max_cost - spent, 0.0)})


def job_of(
    preset: Preset, entry: PresetEntry, config: StageConfig, results: Mapping[str, Result], inputs: Sequence[Run] = ()
) -> StageJob:
    """Return an entry as a job, once the results of what it reads are there."""
    read = [*inputs, *(Run(results[name].path) for name in entry.reads)]
    position = f" (stage {preset.stage.index(entry) + 1} of {len(preset.stage)})"
    inputs_of_entry = assign_inputs(load_stage(entry.stage), read)
    return StageJob(entry.title, entry.stage, inputs_of_entry, config, position, entry.gpus_for(config))


def can_run_in_parallel(configs: Sequence[StageConfig], arguments: Arguments) -> bool:
    """Return whether entries can run at the same time: workers and some servers serve one entry at a time.

    A server of which all weights are replaced follows one training. One of the entries may spend a limited budget.
    """
    if len(configs) == 1 or arguments.on:
        return False
    paying = sum(any(getattr(part, "base_url", None) for _, part in parts("", config)) for config in configs)
    if arguments.max_cost is not None and paying > 1:
        return False
    policies = [policy for config in configs if (policy := getattr(config, "policy", None)) is not None]
    if not any(policy.served for policy in policies):
        return True
    from composer_stages.policy.serving import needs_exclusive_server

    trainings: list[Any] = [config for config in configs if hasattr(config, "adapter")]
    replaced = any(config.adapter.rank == 0 and config.policy.served for config in trainings)
    return not replaced and not any(map(needs_exclusive_server, policies))


def show_plan(
    preset: Preset,
    configs: Mapping[str, StageConfig],
    arguments: Arguments,
    console: Console,
    as_json: bool,
    files: Sequence[Tree],
    configured: call.Configured,
    inputs: Sequence[Run] = (),
) -> None:
    """Print the inputs, plan and GPUs of each entry, and the checks that passed.

    An entry has a plan once what it reads is there. Checked is what the entries that are to run need of servers and the
    machine; raises for the first lack.
    """
    pool = _check_gpus(preset, configs)
    rows, entries, bills = list[tuple[str, str, str]](), list[dict[str, Any]](), list[str]()
    done = dict[str, Result]()
    for entry in preset.stage:
        needs_none = all(slot.optional for slot in load_stage(entry.stage).inputs.values())
        plan: Plan | None = None
        if done.keys() >= set(entry.reads) and (entry.reads or needs_none):
            job = job_of(preset, entry, configs[entry.title], done, inputs)
            # Settings of work that was never done are not compared: that may load a model.
            begun = any((arguments.artifacts / entry.stage).glob("*/manifest.json"))
            if begun and (completed := job.completed(arguments)):
                done[entry.title] = completed
            else:
                if begun and (note := job.nothing_to_resume(arguments)):
                    console.notify(f"{entry.title}: {note}")
                plan, lines = call.planned(job, job.plan(), arguments.config, files, configured)
                bills += lines
        reads = f"after {', '.join(entry.reads)}" if entry.reads else "reads nothing"
        planned = f", {call.describe_plan(plan)}" if plan else ""
        if entry.title in done:
            failed = Run(done[entry.title].path).manifest.outcome.ok is False
            planned = f", {done[entry.title].reason}{', did not pass its own checks' if failed else ''}"
        workers = f", on {entry.on}" if entry.on else ""
        rows.append((entry.title, entry.stage, f"{reads}{planned}{workers}"))
        gpus = pool.needs(entry.gpus_for(configs[entry.title]))
        about = {"name": entry.title, "stage": entry.stage, "reads": entry.reads, "gpus": gpus}
        up_to_date = str(done[entry.title].path) if entry.title in done else None
        entries.append({**about, "plan": asdict(plan) if plan else None, "up_to_date": up_to_date})
    placed = [line for group in preset.groups() if (line := placement(group, configs, pool))]
    # Entries with one server give one line.
    waiting = [config for title, config in configs.items() if title not in done]
    checks = [line for config in waiting for line in config.check()]
    checked = list(dict.fromkeys([*checks, check_disk_space(arguments.artifacts)]))
    if as_json:
        print_json({"entries": entries, "placed": placed, "files": bills, "checked": checked})
    else:
        words = [*(f"  placed: {line}" for line in placed), *call.indented(bills, checked)]
        print_text("\n".join([aligned(rows), *words]))


def _check_gpus(preset: Preset, configs: Mapping[str, StageConfig], on: str | None = None) -> devices.Pool:
    """Return the GPUs of this machine; `UsageError` for an entry that asks for more. Workers check for themselves."""
    pool = devices.Pool()
    for entry in preset.stage:
        if not (on or entry.on):
            pool.check(entry.title, entry.gpus_for(configs[entry.title]))
    return pool


def placement(group: Sequence[PresetEntry], configs: Mapping[str, StageConfig], pool: devices.Pool) -> str:
    """Return how many entries of a group run at the same time, in words; empty for one entry."""
    if len(group) == 1:
        return ""
    named = f"{group[0].title} to {group[-1].title}"
    if not can_run_in_parallel([configs[entry.title] for entry in group], Arguments()):
        return Sentence("cli.one-after-another", named=named)
    cores = resources.cores()
    needs = [gpus for entry in group if (gpus := pool.needs(entry.gpus_for(configs[entry.title])))]
    if not needs:
        return Sentence("cli.at-once-on-cores", named=named, cores=cores)
    return Sentence(
        "cli.at-once-on-gpus",
        named=named,
        needing=len(needs),
        entries=len(group),
        most=min(cores, len(pool.names) // min(needs)),
        gpus=sorted(set(needs)),
        devices=devices.used(len(pool.names), pool.names),
    )


def show(preset: Preset, results: Mapping[str, Result], root: Path, as_json: bool) -> int:
    """Write the report on the chain and print its result; returns the exit code, of which 1 weighs more than 3.

    Printed are the last entry's result, entries that failed their own checks, the report's path, what to type next.
    """
    outcomes = {title: Run(result.path).manifest.outcome for title, result in results.items()}
    codes = [outcome.exit_code for outcome in outcomes.values()]
    code = 1 if 1 in codes else max(codes)
    path = page.save(root, page.chain(root, [str(result.path) for result in results.values()]))
    if as_json:
        summaries = {title: call.summary(result) for title, result in results.items()}
        print_json({"entries": summaries, "report": str(path)})
        return code
    *earlier, last = results
    call.show(results[last], as_json=False)
    for title in earlier:
        if (outcome := outcomes[title]).exit_code:
            failed = outcome.ok is False
            verdict = "did not pass its own checks" if failed else f"is {outcome.summary.get('verdict')}"
            print_text(f"\n{title} {verdict}: see {results[title].path}/report.txt")
    print_text(f"\nThe report: {path}")
    if code:
        named = [(title, run.summary.get("verdict")) for title, run in outcomes.items() if run.exit_code == code]
        reasons = ", ".join(f"{title} {f'is {word}' if word else 'failed its own checks'}" for title, word in named)
        print_text(Sentence("cli.all-entries-run", exit_code=code, reasons=reasons))
    if preset.next:
        print_text(f"\n{preset.next.strip()}")
    return code
