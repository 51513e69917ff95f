"""Who may import whom. Stages and environments are found in the tree: a new one needs no line here."""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("composer_post_training", "composer_cli", "composer_stages")
LAYERS = {
    "composer_stages": (
        "integrations | teachers | comparison | arms",
        "pairs",
        "formats | evaluation",
        "training",
        "gradients",
        "losses | rollouts | diloco",
        "policy",
        "envs",
        "sandbox | swebench",
        "runs",
        "backends",
        "messages | endings",
        "thoughts",
        "redaction",
        "terms",
        "registry",
        "errors | stopping | json_text",
        "words",
        "layout | checkout | data_files",
    ),
    "composer_stages.probe": (
        "figures | watching",
        "descent",
        "sources",
        "checks",
        "metrics",
        "direction",
        "memory | statistics | loras | rows",
        "settings",
    ),
    "composer_stages.envs": (
        "repo",
        "task_checks",
        "config",
        "answered",
        "bash | boundary | programs | task_table",
        "folders",
        "base",
    ),
}
"""The packages below the stages (and below the environments), highest first; those on one line are independent."""
MAY_READ = ("runs", "formats", "swebench", "envs", "evaluation", "comparison", "pairs", "training", "gradients.tensors")
"""What reads and writes tables; the last maps tensors of a run into memory."""
TERMINAL, TABLES = ("typer", "rich", "click", "tqdm"), ("pyarrow", "duckdb", "gzip", "zlib", "safetensors")
ONLY = {
    **dict.fromkeys(TERMINAL, ("composer_cli",)),
    **dict.fromkeys(TABLES, tuple(f"composer_stages.{name}" for name in MAY_READ)),
    "openai": ("composer_stages.policy.client",),
}
"""A package from outside, and where alone it may be imported directly."""
READS = ("compare", "formats", "comparison", "evaluation")
"""Packages that read and compare what was played, and import nothing that plays, directly or not."""
PLAYS = ("sandbox", "policy", "envs", "rollouts.agent_loop")
Broken = set[tuple[str, str]]


@dataclass(frozen=True)
class SideFeature:
    """What serves one question: deleting its modules and tests breaks no other module, and no other test of behaviour.

    Tables, maps of packages, sentences, presets and documents name it in lines of their own, which go with it.

    tests: files and folders, which go with it. names: in the tables of environments and executors.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]
    names: tuple[str, ...] = ()


SIDE_FEATURES = {
    "diloco": SideFeature(
        ("composer_stages.diloco", "composer_stages.training.replicas"), ("stages/diloco", "support/replicas.py")
    ),
    "normalize": SideFeature(("composer_stages.normalize",), ("stages/test_normalize.py",)),
    "frameworks": SideFeature(
        ("composer_stages.compare_frameworks", "composer_stages.integrations.frameworks"),
        ("stages/test_compare_frameworks.py", "stages/integrations/test_verifiers_served.py"),
    ),
    "slurm": SideFeature(
        ("composer_cli.executors.slurm",),
        (
            *(f"composer_cli/executors/{name}.py" for name in ("slurm", "test_slurm", "test_script", "test_states")),
            *("composer_cli/executors/test_jobs.py", "composer_post_training/test_jobs.py"),
            "crash/test_slurm_stops.py",
        ),
        ("slurm",),
    ),
    "hf-jobs": SideFeature(
        ("composer_cli.executors.hf_jobs",), ("composer_cli/executors/test_hf_jobs.py",), ("hf-jobs",)
    ),
    "modal": SideFeature(
        ("composer_cli.executors.modal_sandbox",),
        ("composer_cli/executors/test_modal.py", "composer_cli/executors/modal_service.py"),
        ("modal",),
    ),
    "leetcode-rh": SideFeature(
        ("composer_stages.envs.leetcode_rh",),
        ("stages/envs/leetcode_rh", "composer_cli/test_probe_leetcode.py"),
        ("leetcode-rh",),
    ),
    "feature-deletion": SideFeature(
        ("composer_stages.envs.feature_deletion", "composer_stages.make_tasks"),
        (
            *("stages/envs/feature_deletion", "stages/test_make_tasks.py", "support/removals.py"),
            "composer_cli/test_feature_deletion.py",
        ),
        ("feature-deletion",),
    ),
    "comparisons and figures of the probe": SideFeature(
        ("composer_stages.probe.compare", "composer_stages.probe.plot"),
        ("stages/probe/test_compare.py", "stages/probe/test_plot.py"),
    ),
    "probe-watch": SideFeature(("composer_stages.probe.watch",), ("stages/probe/test_watch.py",)),
    "probe-start": SideFeature(("composer_stages.probe.start",), ("stages/probe/test_start.py",)),
}
TIED = {
    "composer_stages.training.config": "diloco is a group of train's settings, whose type a validated model must know",
    "composer_stages.training.assembly": "rounds are held between the trainer's steps",
    "composer_stages.train": "a replica joins the others before its model is loaded",
}
"""What imports a side feature although it is none, and why."""
NAMED = {"needs.py": "programs and packages of executors", "stages/probe/test_rows.py": "a folder of recorded rows"}
"""Test files that hold the name of a side feature and do not fail without it."""


def verbs(container: str) -> str:
    """The modules of a package that end in `STAGE = ...`; of environments, the packages with an `env.py`."""
    folder = ROOT / container.replace(".", "/")
    if container == "composer_stages.envs":
        return " | ".join(sorted(path.parent.name for path in folder.glob("*/env.py")))
    found = {path.stem for path in folder.glob("*.py") if "\nSTAGE = " in path.read_text()}
    return " | ".join(sorted(found | ({"probe"} if container == "composer_stages" else set())))


def layers(names: tuple[str, ...]) -> list[grimp.Layer]:
    return [grimp.Layer(*line.split(" | ")) for line in names]


def broken(graph: grimp.ImportGraph) -> Broken:
    """The imports that the rules forbid, as (importer, imported)."""
    wrong = graph.find_illegal_dependencies_for_layers(layers(PACKAGES))
    for container, below in LAYERS.items():
        wrong |= graph.find_illegal_dependencies_for_layers(layers((verbs(container), *below)), containers={container})
    found = {(head, tail) for one in wrong for route in one.routes for head in route.heads for tail in route.tails}
    for package, allowed in ONLY.items():
        if package in graph.modules:
            for module in graph.find_modules_that_directly_import(package):
                if not f"{module}.".startswith(tuple(f"{name}." for name in allowed)):
                    found.add((module, package))
    return found


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.fixture(scope="module")
def typed_graph() -> grimp.ImportGraph:
    """Without imports for type checkers alone."""
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)


def circles(graph: grimp.ImportGraph) -> list[tuple[str, str]]:
    """The pairs of modules that import each other, directly or not."""
    below = {module: graph.find_upstream_modules(module) for module in graph.modules}
    return [(a, b) for a, others in below.items() for b in others if a < b and a in below[b]]


def test_modules_do_not_import_each_other_in_a_circle(typed_graph: grimp.ImportGraph) -> None:
    """Imports inside functions count, those for type checking alone do not."""
    graph = deepcopy(typed_graph)
    assert circles(graph) == []
    graph.add_import(importer="composer_stages.runs.kinds", imported="composer_stages.collect")
    assert ("composer_stages.collect", "composer_stages.runs.kinds") in circles(graph)


def test_imports_go_in_one_direction(graph: grimp.ImportGraph) -> None:
    assert broken(graph) == set()


@pytest.mark.parametrize("container", LAYERS)
def test_every_module_has_a_layer(container: str, graph: grimp.ImportGraph) -> None:
    named = {name for line in (verbs(container), *LAYERS[container]) for name in line.split(" | ")}
    assert {module.rpartition(".")[2] for module in graph.find_children(container)} == named


def wrong_imports(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """For every module of ours one import that each rule forbids."""
    tops = {f"composer_stages.{name}" for name in verbs("composer_stages").split(" | ")}
    for module in sorted(m for m in graph.modules if m.startswith(PACKAGES) and m not in PACKAGES):
        if module.startswith("composer_stages."):
            yield module, next(iter(sorted(tops - {module, ".".join(module.split(".")[:2])})))
            yield module, "composer_cli.app"
        for package, allowed in ONLY.items():
            if not f"{module}.".startswith(tuple(f"{name}." for name in allowed)):
                yield module, package


def imports_of_players(graph: grimp.ImportGraph) -> Broken:
    """The pairs of a module that reads logs and one that plays rollouts which it imports, directly or not."""
    below = {
        f"composer_stages.{name}": graph.find_upstream_modules(f"composer_stages.{name}", as_package=True)
        for name in READS
    }
    playing = tuple(f"composer_stages.{name}." for name in PLAYS)
    return {
        (reader, module) for reader, modules in below.items() for module in modules if f"{module}.".startswith(playing)
    }


def test_what_reads_logs_imports_nothing_that_plays(typed_graph: grimp.ImportGraph) -> None:
    graph = deepcopy(typed_graph)
    assert imports_of_players(graph) == set()
    for name in READS:
        for player in PLAYS:
            importer = f"composer_stages.{name}{'.report' * (name in ('comparison', 'evaluation'))}"
            graph.add_import(importer=importer, imported=f"composer_stages.{player}")
            assert (f"composer_stages.{name}", f"composer_stages.{player}") in imports_of_players(graph)
            graph.remove_import(importer=importer, imported=f"composer_stages.{player}")


def test_every_wrong_import_is_found(graph: grimp.ImportGraph) -> None:
    """All at once, in memory: each of them is named."""
    copy, added = deepcopy(graph), list(wrong_imports(graph))
    for importer, imported in added:
        copy.add_import(importer=importer, imported=imported)
    assert set(added) <= broken(copy) and len(added) > 1000


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of these, or below one."""
    return f"{name}.".startswith(tuple(f"{package}." for package in packages))


@pytest.mark.parametrize("feature", SIDE_FEATURES.values(), ids=SIDE_FEATURES)
def test_nothing_but_tables_leads_to_a_side_feature(feature: SideFeature, typed_graph: grimp.ImportGraph) -> None:
    modules = [module for module in typed_graph.modules if within(module, feature.modules)]
    assert {package for package in feature.modules if package in modules} == set(feature.modules)
    importers = {name for module in modules for name in typed_graph.find_modules_that_directly_import(module)}
    assert {name for name in importers if not within(name, feature.modules)} <= TIED.keys()


def references(path: Path) -> tuple[set[str], set[str]]:
    """Return the dotted names that a file imports, and the strings in it."""
    imports, strings = set[str](), set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                imports |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                imports |= {f"{module}.{alias.name}" for alias in names}
            case ast.Constant(value=str(text)):
                strings.add(text)
    return imports, strings


def test_no_other_test_depends_on_a_side_feature() -> None:
    tests, broken_by = ROOT / "tests", set[tuple[str, str]]()
    for path in sorted(tests.rglob("*.py")):
        imports, strings = references(path)
        file = path.relative_to(tests).as_posix()
        for name, feature in SIDE_FEATURES.items():
            if f"{file}/".startswith(tuple(f"{own}/" for own in feature.tests)) or path == Path(__file__):
                continue
            helpers = [own.removesuffix(".py").replace("/", ".") for own in feature.tests]
            packages = (*feature.modules, *helpers, *(f"tests.{helper}" for helper in helpers))
            named = strings & {*feature.names} and file not in NAMED
            quoted = any(f"{module}{end}" in text for text in strings for module in feature.modules for end in ".: ")
            if named or quoted or any(within(imported, packages) for imported in imports):
                broken_by.add((file, name))
    assert broken_by == set()
    assert all((tests / own).exists() for feature in SIDE_FEATURES.values() for own in feature.tests)
