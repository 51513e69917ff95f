"""Runs a preset: every entry after those it reads, what is up to date skipped, the last entry's result in the end."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from composer_cli import launch, parallel, report
from composer_cli.console import Console
from composer_cli.launch import Job, RunOptions
from composer_cli.parallel import Waiting
from composer_cli.preset import Entry, Preset
from composer_cli.printing import print_json, print_text
from composer_cli.report import facts
from stages.errors import ComposerError
from stages.runs.artifact import Inputs, Run
from stages.runs.config import StageConfig
from stages.runs.runner import Result, check_disk_space
from stages.runs.stage import Plan, assign_inputs, load_stage


def run(
    preset: Preset, configs: Mapping[str, StageConfig], run_options: RunOptions, console: Console
) -> dict[str, Result]:
    """The results by title, in order. Stops at the first entry that fails or, by default, judges itself not ok."""
    results: dict[str, Result] = {}
    for group in preset.groups():
        waiting = [Waiting(e.title, e.stage, e.reads, partial(_job, preset, e, configs[e.title])) for e in group]
        require = _any if preset.to_the_end else _require_ok
        if at_once([configs[entry.title] for entry in group], run_options):
            results |= parallel.execute(waiting, results, run_options, console, require)
            continue
        for entry, one in zip(group, waiting, strict=True):
            theirs = replace(run_options, on=run_options.on or entry.on or None)
            results[one.title] = launch.execute(one.job(results), theirs, console)
            require(one.title, results[one.title])
    return results


def at_once(configs: Sequence[StageConfig], run_options: RunOptions) -> bool:
    """Whether entries run beside each other: workers are busy with one at a time, and so are some servers."""
    if len(configs) == 1 or run_options.on:
        return False
    policies = [policy for config in configs if (policy := getattr(config, "policy", None)) is not None]
    if not any(policy.served for policy in policies):
        return True
    from stages.policy.serving import needs_exclusive_server

    return not any(map(needs_exclusive_server, policies))


def place(preset: Preset, entry: Entry) -> str:
    """Where an entry stands in its chain."""
    return f" (stage {preset.stage.index(entry) + 1} of {len(preset.stage)})"


def _job(preset: Preset, entry: Entry, config: StageConfig, results: Mapping[str, Result]) -> Job:
    runs = [Run(results[name].path) for name in entry.reads]
    inputs = assign_inputs(load_stage(entry.stage), runs)
    return Job(entry.title, entry.stage, inputs, config, place(preset, entry))


def _any(title: str, result: Result) -> None:
    """Whatever an entry says of itself, the chain goes on."""


def _require_ok(title: str, result: Result) -> None:
    if Run(result.path).manifest.outcome.ok is False:
        raise ComposerError(
            f"{title} did not pass its own checks, so nothing that builds on it was run: see {result.path}/report.txt."
        )


def plans(preset: Preset, configs: Mapping[str, StageConfig]) -> list[dict[str, Any]]:
    """The chain as JSON: what each entry reads, and its plan where it reads nothing."""
    return [
        {"name": e.title, "stage": e.stage, "reads": e.reads, "plan": plan and plan.as_dict()}
        for e in preset.stage
        for plan in [_free_plan(e, configs[e.title])]
    ]


def _free_plan(entry: Entry, config: StageConfig) -> Plan | None:
    stage = load_stage(entry.stage)
    free = not entry.reads and not any(not slot.optional for slot in stage.inputs.values())
    return stage.plan(Inputs(), config) if free else None


def checked(configs: Mapping[str, StageConfig], root: Path) -> list[str]:
    """What the entries need of the world outside and have, a line each; raises for the first that lacks something."""
    return list(
        dict.fromkeys([*(line for config in configs.values() for line in config.check()), check_disk_space(root)])
    )


def overview(preset: Preset, configs: Mapping[str, StageConfig], root: Path) -> str:
    """The chain as text: what each entry reads, its plan where it reads nothing, and what was checked for all."""
    lines = []
    for entry in preset.stage:
        reads = f"after {', '.join(entry.reads)}" if entry.reads else "reads nothing"
        free = _free_plan(entry, configs[entry.title])
        plan = f", {launch.planned(free)}" if free else ""
        workers = f", on {entry.on}" if entry.on else ""
        lines.append(f"{entry.title:<18}{entry.stage:<18}{reads}{plan}{workers}")
    return "\n".join([*lines, *(f"  checked: {line}" for line in checked(configs, root))])


def show(preset: Preset, results: Mapping[str, Result], root: Path, as_json: bool) -> int:
    """Report on the chain and print its result; returns the exit code.

    Printed are the last entry's result, entries that failed their own checks, where the report lies, what to type next.
    """
    codes = {title: Run(result.path).manifest.outcome.exit_code for title, result in results.items()}
    page = report.write(root, facts.chain(root, [str(result.path) for result in results.values()]))
    if as_json:
        summaries = {title: launch.summary(result) for title, result in results.items()}
        print_json({"entries": summaries, "report": str(page)})
        return _worst(codes.values())
    *earlier, last = results
    launch.show(results[last], as_json=False)
    for title in earlier:
        if codes[title]:
            print_text(f"\n{title} {_said(results[title])}: see {results[title].path}/report.txt")
    print_text(f"\nThe report: {page}")
    if code := _worst(codes.values()):
        print_text(f"Every entry was run. Exit code {code}: {_why(code, results)}.")
    if preset.next:
        print_text(f"\n{preset.next.strip()}")
    return _worst(codes.values())


def _said(result: Result) -> str:
    """What became of an entry that ends in another code than 0."""
    outcome = Run(result.path).manifest.outcome
    verdict = outcome.summary.get("verdict")
    return "did not pass its own checks" if outcome.ok is False else f"is {verdict}"


def _why(code: int, results: Mapping[str, Result]) -> str:
    """Which entries ended in a code, and with what verdict."""
    outcomes = {title: Run(result.path).manifest.outcome for title, result in results.items()}
    shown = [(title, o.summary.get("verdict", "failed checks")) for title, o in outcomes.items() if o.exit_code == code]
    return ", ".join(f"{title} is {verdict}" for title, verdict in shown)


def _worst(codes: Collection[int]) -> int:
    """What failed weighs more than what was inconclusive."""
    return 1 if 1 in codes else max(codes)
