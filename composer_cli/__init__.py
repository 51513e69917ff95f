"""The command line: commands parse arguments, execute stages and print results. All science is in `stages`.

api.py           - the stages as Python functions
app.py           - the program: one command for each stage, chains of stages, and the commands about runs
chain.py         - executes a preset
complete.py      - completion of words in a shell
console.py       - progress on stderr
executors/       - `composer run --on`: chains submitted elsewhere
launch.py        - one stage from arguments to result
looking.py       - the commands that show runs and jobs
options.py       - the options, declared once
parallel.py      - several stages at once, each in a process
preset.py        - presets: chains of stages in TOML
presets/         - the presets shipped with Composer
printing.py      - results on stdout
report/          - `composer report`: one HTML file about a chain of runs
serve.py         - `composer serve`: a server of a model, or of the model that a run trained
settings.py      - settings of a stage from defaults, files and arguments
show/            - `composer show`, `status`, `query`
stage_command.py - the command of a stage, and its positional arguments
swe.py           - `composer swe check`: what is missing on a machine for SWE-bench
version.py       - the version of Composer
view/            - `composer view`: a local web page over all runs
"""
