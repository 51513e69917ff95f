"""The command of a chain: `composer run`."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import typer

from composer_cli import options
from composer_cli.help import ALL, HelpCommand
from composer_cli.printing import interrupt_leaves, reporting_errors
from composer_cli.stage_command import ON_COMMAND_LINE, Declared, arguments, of_fields, parameters
from stages.errors import UsageError


class ChainCommand(HelpCommand):
    """The command of a chain, whose help with `--all` lists the settings of each executor."""

    def __init__(self, name: str, help: str) -> None:
        super().__init__(name, help=help, rich_markup_mode=None)

    def all_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        from composer_cli.call import ChainArguments

        declared: Declared = {
            "preset": (options.Preset, None),
            "set_": (options.Set, None),
            **of_fields(ChainArguments),
            "tune": (options.Tune, None),
            **{name: one for name, one in ON_COMMAND_LINE.items() if name != "plan"},
        }
        self.params = self.params or parameters(declared)
        return super().all_params(ctx)

    def settings(self, ctx: Any) -> Iterable[tuple[str, Any, str]]:
        """Yield the settings of every --on."""
        from composer_cli.executors import base

        for word in base.EXECUTORS if ctx.meta.get(ALL) else ():
            title = f"Settings of --on {word}, for --set on.KEY=VALUE or a table [on] in a file"
            yield title, base.load(word).settings, "on."

    def invoke(self, ctx: Any) -> None:
        """Run the chain, submit it, or show its plan, as its options ask."""
        from composer_cli import call, chain
        from composer_cli.console import Console
        from composer_cli.executors import base, jobs
        from composer_cli.preset import configure_preset, load_preset, read_for_preset
        from stages.runs.settings import assignment

        given = ctx.params
        with reporting_errors(json=given["json"], verbose=given["verbose"], resumes=not given["dry_run"]):
            call.require_one_process("composer run")
            asked: call.ChainArguments = arguments(call.ChainArguments, given)
            where = asked.on or base.LOCAL
            wanted = load_preset(given["preset"]).going_on(asked.to_the_end)
            console, typed = Console(asked.quiet, watch=given["watch"]), list(given["set_"] or ())
            files = read_for_preset(wanted, asked.config, console.notify)
            layers, on_settings = jobs.split_on([*files, *map(assignment, typed)])
            files, typed_layers = layers[: len(files)], layers[len(files) :]
            configured = partial(configure_preset, wanted, typed=typed_layers, policy=asked.policy, trust=asked.trust)
            configs = configured(files)
            if base.executor(where) is not None:
                if given["tune"]:
                    raise UsageError("--tune runs here, and --on submits a chain elsewhere. Tune without --on first.")
                request = jobs.Request(str(given["preset"]), asked, typed, configs, on_settings)
                unsure = "`composer status` lists the chain if it was submitted by then; else start it again."
                with interrupt_leaves(unsure):
                    jobs.submit_or_show(request, dry_run=given["dry_run"], json=given["json"])
                return
            asked = asked.model_copy(update={"on": None if where == base.LOCAL else where})
            if given["tune"]:
                from composer_cli import tuning  # with the statistics and numpy, which few chains need

                if given["dry_run"]:
                    _, wanted, configs = tuning.trial_entries(wanted, configs, *tuning.parse(given["tune"]))
                else:
                    configs, _ = tuning.tune(wanted, configs, given["tune"], asked, console)
            if given["dry_run"]:
                # Of the entries that --tune adds no file changes the bill.
                chain.show_plan(
                    *(wanted, configs, asked, console, given["json"], files),
                    lambda others: {**configs, **configured(others)},
                )
                return
            results = chain.run(wanted, configs, asked, console)
            raise typer.Exit(chain.show(wanted, results, asked.artifacts, given["json"]))
