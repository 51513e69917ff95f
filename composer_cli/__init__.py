"""The command line: commands parse arguments, execute stages and print results. All science is in `composer_stages`.

In Python, the same is done by `import composer_post_training`.

app.py           - the program: one command for each stage, and `composer run`
chain.py         - executes a preset
commands.py      - the commands about runs, submitted jobs and served models
completions.py   - the HTTP server of a model in this process
console.py       - progress on stderr while stages work
executors/       - `composer run --on`: chains submitted elsewhere
help.py          - what `--help` shows, and `--help --all`
call.py          - one stage from arguments to result
loopback.py      - ports of this machine that its servers listen on
options.py       - options of several commands, and completion in a shell
parallel.py      - several stages at once, each in a process
preset.py        - presets: chains of stages in TOML, and the settings of their entries
presets/         - the presets shipped with Composer
printing.py      - results on stdout, sentences on stderr, exit codes
sampler.py       - the queue of requests for a model in this process
serve.py         - `composer serve`: a server of a model or of a run's checkpoint
show/            - `composer show`, `status`, `query`, and the facts about runs
stage_command.py - the command of a stage, and that of a chain, `composer run`
tasks.py         - `composer tasks check` and `convert`; `composer swe check`: what a machine lacks for SWE-bench
trust.py         - settings files that would send a provider's key to another server
tuning.py        - `composer run --tune`: one setting of every arm, chosen by equally many trials
view/            - `composer view`: a local web page over all runs; `composer report`: one saved page about a chain
"""
