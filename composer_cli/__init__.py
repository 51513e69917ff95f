"""The command line: it knows terminals and no science. Commands read words, ask `stages` to work, show results.

api.py           - the stages as Python functions
app.py           - the program: one command a stage, chains of them, and what stands beside
chain.py         - runs a preset
complete.py      - what a shell offers after Tab
console.py       - what people see on stderr while work goes on
errors.py        - how a command ends: a sentence and an exit code
executors/       - `composer run --on`: chains submitted elsewhere
launch.py        - one stage from words to result
looking.py       - the commands that look at runs and jobs
options.py       - the options, declared once
parallel.py      - several stages at once, each in a process
positionals.py   - the bare words after a stage's name
preset.py        - presets: chains of stages in TOML
presets/         - those that are shipped
printing.py      - results on stdout
report/          - `composer report`: one HTML file about a chain of runs
serve.py         - `composer serve`: a server of a model or of what a run trained
settings.py      - settings of a stage from defaults, files and words
show/            - `composer show`, `status`, `query`
stage_command.py - the command of a stage
swe.py           - `composer swe check`: what a machine lacks for SWE-bench
version.py       - which Composer this is
view/            - `composer view`: a local web page over all runs
visible.py       - what steers a terminal is shown, not obeyed
"""
