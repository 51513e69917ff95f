"""Run a preset: every entry after those it reads, what is up to date skipped, the last entry's result in the end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_cli import launch, parallel, report
from composer_cli.console import Console
from composer_cli.launch import RunOptions, StageJob
from composer_cli.parallel import WaitingEntry
from composer_cli.printing import print_json, print_text
from composer_cli.settings import Preset, PresetEntry
from stages.errors import ComposerError
from stages.runs.artifact import Inputs, Run
from stages.runs.config import StageConfig
from stages.runs.runner import Result, check_disk_space
from stages.runs.stage import assign_inputs, load_stage


def run(
    preset: Preset, configs: Mapping[str, StageConfig], run_options: RunOptions, console: Console
) -> dict[str, Result]:
    """Return the results by title, in order; raises at the first entry that fails or, by default, judges itself not ok.

    Entries of a group run in processes of their own where they do not need the same workers or server.
    """

    def job(entry: PresetEntry, results: Mapping[str, Result]) -> StageJob:
        runs = [Run(results[name].path) for name in entry.reads]
        inputs = assign_inputs(load_stage(entry.stage), runs)
        position = f" (stage {preset.stage.index(entry) + 1} of {len(preset.stage)})"
        return StageJob(entry.title, entry.stage, inputs, configs[entry.title], position)

    def require(title: str, result: Result) -> None:
        if not preset.to_the_end and Run(result.path).manifest.outcome.ok is False:
            raise ComposerError(
                f"{title} did not pass its own checks, so nothing that builds on it was run: see "
                f"{result.path}/report.txt."
            )

    results: dict[str, Result] = {}
    for group in preset.groups():
        if at_once([configs[entry.title] for entry in group], run_options):
            waiting = [WaitingEntry(entry.title, entry.stage, entry.reads, partial(job, entry)) for entry in group]
            results |= parallel.execute(waiting, results, run_options, console, require)
            continue
        for entry in group:
            own_options = replace(run_options, on=run_options.on or entry.on or None)
            results[entry.title] = launch.execute(job(entry, results), own_options, console)
            require(entry.title, results[entry.title])
    return results


def at_once(configs: Sequence[StageConfig], run_options: RunOptions) -> bool:
    """Whether entries can run at the same time: workers do one entry at a time, and so do some servers."""
    if len(configs) == 1 or run_options.on:
        return False
    policies = [policy for config in configs if (policy := getattr(config, "policy", None)) is not None]
    if not any(policy.served for policy in policies):
        return True
    from stages.policy.serving import needs_exclusive_server

    return not any(map(needs_exclusive_server, policies))


def show_plan(preset: Preset, configs: Mapping[str, StageConfig], root: Path, as_json: bool) -> None:
    """Print which entries each entry reads, its plan where it reads nothing, and what was checked for all entries.

    Checked is what they need of servers and the machine; raises for the first lack.
    """
    lines, entries = list[str](), list[dict[str, Any]]()
    for entry in preset.stage:
        stage = load_stage(entry.stage)
        # The plan of an entry that reads runs depends on runs that are not made yet.
        free = not entry.reads and all(slot.optional for slot in stage.inputs.values())
        plan = stage.plan(Inputs(), configs[entry.title]) if free else None
        reads = f"after {', '.join(entry.reads)}" if entry.reads else "reads nothing"
        planned = f", {launch.plan_in_words(plan)}" if plan else ""
        workers = f", on {entry.on}" if entry.on else ""
        lines.append(f"{entry.title:<18}{entry.stage:<18}{reads}{planned}{workers}")
        about = {"name": entry.title, "stage": entry.stage, "reads": entry.reads}
        entries.append({**about, "plan": asdict(plan) if plan else None})
    # Entries with one server give one line.
    checks = [line for config in configs.values() for line in config.check()]
    checked = list(dict.fromkeys([*checks, check_disk_space(root)]))
    if as_json:
        print_json({"entries": entries, "checked": checked})
    else:
        print_text("\n".join([*lines, *(f"  checked: {line}" for line in checked)]))


def show(preset: Preset, results: Mapping[str, Result], root: Path, as_json: bool) -> int:
    """Write the report on the chain and print its result; returns the exit code, of which 1 weighs more than 3.

    Printed are the last entry's result, entries that failed their own checks, the report's path, what to type next.
    """
    outcomes = {title: Run(result.path).manifest.outcome for title, result in results.items()}
    codes = [outcome.exit_code for outcome in outcomes.values()]
    code = 1 if 1 in codes else max(codes)
    page = report.write(root, report.chain(root, [str(result.path) for result in results.values()]))
    if as_json:
        summaries = {title: launch.summary(result) for title, result in results.items()}
        print_json({"entries": summaries, "report": str(page)})
        return code
    *earlier, last = results
    launch.show(results[last], as_json=False)
    for title in earlier:
        if (outcome := outcomes[title]).exit_code:
            failed = outcome.ok is False
            verdict = "did not pass its own checks" if failed else f"is {outcome.summary.get('verdict')}"
            print_text(f"\n{title} {verdict}: see {results[title].path}/report.txt")
    print_text(f"\nThe report: {page}")
    if code:
        named = [
            (title, o.summary.get("verdict", "failed checks")) for title, o in outcomes.items() if o.exit_code == code
        ]
        reasons = ", ".join(f"{title} is {verdict}" for title, verdict in named)
        print_text(f"Every entry was run. Exit code {code}: {reasons}.")
    if preset.next:
        print_text(f"\n{preset.next.strip()}")
    return code
