"""What `composer swe check` finds, with clones, environments and engines that are there, or lack one part each."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call

from composer_stages.envs.swe import env
from composer_stages.envs.swe.env import SweEnv, WayToRun
from composer_stages.envs.swe.specs import EnvironmentSpec
from composer_stages.sandbox import containers

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
STAND_IN = """\
#!/bin/sh
case "$1" in
  info) [ -n "$2" ] && echo '{info}'; exit 0 ;;
  images) echo "swebench/sweb.eval.x86_64.acme_1776_abacus-7:latest" ;;
  manifest) echo "no such host" >&2; exit 1 ;;
esac
"""


def states(way: WayToRun) -> dict[str, str]:
    return {part.name: part.state for part in way.parts}


def found(way: WayToRun, name: str) -> str:
    return next(f"{part.found} -> {part.way_out}" for part in way.parts if part.name == name)


@pytest.fixture
def locally(row: dict[str, Any], repos: Path, venvs: Path) -> Callable[..., WayToRun]:
    """What is found for the row, with its clone and environment, unless these are changed."""

    def look(*rows: dict[str, Any], clones: Path | str = repos, built: Path = venvs, **spec: Any) -> WayToRun:
        def spec_of(row: Any) -> EnvironmentSpec:
            return EnvironmentSpec(**{"python": HERE, **spec})

        return env.local_requirements([{**row, **one} for one in rows or ({},)], str(clones), built, spec=spec_of)

    return look


def test_with_a_clone_an_environment_and_a_sandbox_nothing_is_missing(
    locally: Callable[..., WayToRun], row: dict[str, Any], repos: Path, venvs: Path
) -> None:
    way = locally()
    assert way.ready and states(way)["sandbox"] == "ok", way.parts
    # What swebench's table does not say is guessed.
    assert states(way)["specifications"] == "note" and "post-training[swe]" in found(way, "specifications")
    assert states(locally(source="swebench's table"))["specifications"] == "ok"
    way = env.local_requirements([row], str(repos), venvs, "cellophane")
    assert not way.ready and "cellophane" in found(way, "sandbox")


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"repo": "acme/other"}, {}, "0 of 1 repositories .* --mirror https://github.com/acme/other"),
        ({"base_commit": "0" * 40}, {}, "no base commit of 1 rows, such as acme__abacus-7"),
        ({}, {"clones": ""}, "--set env.repos=DIR"),
    ],
)
def test_a_clone_that_is_missing_or_too_old_is_named(
    locally: Callable[..., WayToRun], change: dict[str, str], options: dict[str, str], words: str
) -> None:
    way = locally(change, **options)
    assert not way.ready and states(way)["clones"] == "missing"
    assert re.search(words, found(way, "clones")), found(way, "clones")


def test_what_is_to_be_built_is_counted_and_needs_an_interpreter_and_conda(
    locally: Callable[..., WayToRun], tmp_path: Path
) -> None:
    others = ({"repo": "sympy/sympy", "version": version} for version in ("1", "2"))
    way = locally({}, *others, built=tmp_path)
    assert states(way)["environments"] == "ok" and "0 of 3 are there" in found(way, "environments")
    old = {"python": "2.3", "needs_conda": True}
    way = locally(built=tmp_path, **old)
    assert {name for name, state in states(way).items() if state == "missing"} == {"environments", "Python 2.3"}
    assert "pyenv install 2.3" in found(way, "Python 2.3") and "made by conda" in found(way, "environments")
    assert locally(**old).ready, "for building alone"


@pytest.fixture
def docker(tmp_path: Path, put_docker: Callable[..., Path]) -> Path:
    """A program called docker that answers as one does, and no other engine."""
    told = {"SecurityOptions": ["name=seccomp"], "DockerRootDir": str(tmp_path)}
    return put_docker(STAND_IN.format(info=json.dumps(told)), alone=True)


def test_images_that_an_engine_holds_need_no_registry_and_others_are_fetched(row: dict[str, Any], docker: Path) -> None:
    way = env.container_requirements([row], str(docker))
    assert way.ready and "1 of 1 are here" in found(way, "images") and "as root" in found(way, "engine")
    way = env.container_requirements([row, {**row, "instance_id": "acme__abacus-8"}], str(docker))
    assert not way.ready
    assert "1 of 2 are here; docker.io/swebench/" in found(way, "images") and "no such host" in found(way, "images")


def test_without_an_engine_each_is_named_with_its_reason(row: dict[str, Any], docker: Path) -> None:
    docker.write_text("#!/bin/sh\necho Cannot connect to the daemon >&2\nexit 1\n")
    way = env.container_requirements([row], containers.find_engine())
    said = found(way, "engine")
    assert "docker does not answer (Cannot connect to the daemon)" in said and "podman is not installed" in said
    assert not way.ready


def test_a_folder_that_is_missing_counts_as_the_one_above_it(row: dict[str, Any], docker: Path) -> None:
    told = {"host": {"security": {"rootless": True}}, "store": {"graphRoot": "/nowhere/at/all"}}
    docker.write_text(STAND_IN.format(info=json.dumps(told)))
    way = env.container_requirements([row], str(docker))
    assert "rootless" in found(way, "engine") and states(way)["disk"] == "ok"


@pytest.mark.slow
def test_the_environment_reports_on_the_way_that_it_takes(path: Path, repos: Path, venvs: Path) -> None:
    report = SweEnv(path=str(path), repos=str(repos), venvs=str(venvs)).requirements("eval")
    assert report.ready and report.chosen == "local" and report.rows.found.startswith("1 of ")
    assert SweEnv(path=str(path)).requirements("eval").chosen == "containers"
    lost = SweEnv(path=str(path.with_name("none.jsonl")), repos=str(repos)).requirements("eval")
    assert not lost.ready and "There is no file of instances" in lost.rows.found


def test_the_command_says_it_in_words_and_as_json_and_ends_by_outcome(
    path: Path, repos: Path, venvs: Path, tmp_path: Path
) -> None:
    words = ["swe", "check", "--set", f"env.path={path}", "--set", f"env.venvs={venvs}"]
    whole = call(tmp_path, *words, "--set", f"env.repos={repos}")
    assert whole.returncode == 0 and "Ready: `composer collect --env swe-lite` can begin here (local)." in whole.stdout
    lacking = call(tmp_path, *words, "--set", f"env.repos={tmp_path}", "--json")
    assert lacking.returncode == 3, lacking.stderr
    told = json.loads(lacking.stdout)
    assert told["ready"] is False and told["chosen"] == "local"
    (local,) = (way for way in told["ways"] if way["way"] == "local")
    assert {"clones": "missing"}.items() <= {part["name"]: part["state"] for part in local["parts"]}.items()
    other = call(tmp_path, "swe", "check", "--set", "env.name=kata")
    assert other.returncode == 2 and "looks at swe-lite, not at 'kata'" in other.stderr
