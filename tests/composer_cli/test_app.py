import json
import subprocess
import sys
from pathlib import Path

from stages import STAGES

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "pyarrow",
    "duckdb",
    "openai",
    "scipy",
    "matplotlib",
    "pydantic",
    "rich",
    "numpy",
}
COMMANDS = [
    *(name for name, stage in STAGES.items() if stage.group != "probe"),
    "probe",
    "run",
    "status",
    "show",
    "query",
    "report",
]


def test_help_lists_every_command_and_imports_nothing_heavy():
    script = (
        "import sys, json\nfrom composer_cli.app import main\n"
        "try: main(['--help'])\nfinally: print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    shown, _, modules = done.stdout.strip().rpartition("\n")
    assert done.returncode == 0
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    assert not HEAVY & set(json.loads(modules))


def test_stages_are_light_to_import():
    script = (
        f"import sys\nfor name in {[stage.module for stage in STAGES.values()]}: __import__(name)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not (HEAVY - {"pyarrow", "pydantic", "numpy"}) & set(done.stdout.split())


def test_a_stage_lists_its_settings_and_only_the_short_options_it_has(composer):
    collect, pairs = composer("collect", "--help").stdout, composer("extract-pairs", "--help").stdout
    assert "policy.temperature=1.0" in collect and "--env" in collect and "--teachers" not in collect
    assert "compare=outcome" in pairs and "--env" not in pairs
    assert "--teachers" in composer("replay-teachers", "--help").stdout


def test_version_says_which_composer_this_is(composer):
    done = composer("--version")
    assert done.returncode == 0 and "post-training coding agents" in done.stdout and str(ROOT) in done.stdout


def test_usage_errors_are_one_sentence_and_exit_2(composer):
    for words, part in (
        (["bollect"], "Did you mean 'collect'?"),
        (["collect", "--bollect"], "--bollect"),
        (["collect", "--limit", "many"], "--limit"),
        (["show"], "RUN"),
    ):
        done = composer(*words)
        assert done.returncode == 2 and part in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


def test_another_package_called_stages_is_named(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").write_text("STAGES = {}")
    script = f"import sys\nsys.path[:0] = [{str(tmp_path)!r}]\nfrom composer_cli.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and str(tmp_path / "stages") in done.stderr and "Traceback" not in done.stderr
