"""A task as a row in SWE-bench's shape, from which the task can be set up again with the package.

The classic twelve columns, the four of the newer shape, and those of feature deletion. `base_commit` is the digest of
the package and the removal; `patch` puts the original code back.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from composer_stages.envs.feature_deletion.definitions import Edit, apply_edits
from composer_stages.envs.feature_deletion.package import Package
from composer_stages.envs.feature_deletion.selection import KEEP, PROMPTS, Removal
from composer_stages.envs.feature_deletion.twins import QuotedTest
from composer_stages.envs.feature_deletion.worker import Baseline
from composer_stages.envs.repo import trees
from composer_stages.errors import BadInput
from composer_stages.runs import store
from composer_stages.runs.kinds import Row
from composer_stages.swebench.lists import TestLists, lists_of
from composer_stages.terms import TWIN


def build(
    package: Package,
    removal: Removal,
    writes: Mapping[str, str],
    lists: TestLists,
    baseline: Baseline,
    quoted: QuotedTest | None,
    twin: QuotedTest | None,
    hanging: Sequence[str] = (),
) -> Row:
    """Return the row of an accepted task; it holds no measured time.

    `writes` are the delivered texts of the files that lost code, `hanging` the tests that do not end without it.
    `quoted` is a test for the description, `twin` the same where its contradiction makes an impossible variant.
    """
    options = [*baseline.options, *(f"--deselect={test}" for test in hanging)]
    # There is no repository: the id of the base commit stands for the package and what is removed from it.
    commit = store.digest([package.sha256, removal.identity])[:40]
    edits = [(part.path, edit) for part in removal.parts for edit in part.edits(KEEP[removal.difficulty])]
    # The gold patch leads from the delivered text to the original; only changed files are written to compare them.
    with trees.scratch() as delivered:
        trees.apply({path: trees.TreeFile(text.encode()) for path, text in writes.items()}, delivered)
        originals = {path: file for path in writes if (file := trees.read(package.root, path)) is not None}
        patch = trees.patch(delivered, dict(originals))
    statement = PROMPTS["statement"].format(
        package=f"The package {package.name}",
        names=", ".join(f"{part.qualname} in {part.path}" for part in removal.parts),
        lost=PROMPTS["lost"][removal.difficulty],
        failing=len(lists.fail_to_pass),
    )
    if quoted is not None:
        statement += PROMPTS["example"].format(path=quoted.path, quote=quoted.quote)
    return {
        "repo": f"local/{package.name}",
        "instance_id": instance_id(package, removal),
        "base_commit": commit,
        "patch": patch,
        "test_patch": "",
        "problem_statement": statement,
        "hints_text": "",
        "created_at": "",
        "version": package.version,
        "FAIL_TO_PASS": json.dumps(lists.fail_to_pass),
        "PASS_TO_PASS": json.dumps(lists.pass_to_pass),
        "environment_setup_commit": commit,
        "image": "",
        "eval_script": PROMPTS["script"]["eval"].format(arguments=shlex.join([*options, *baseline.files])),
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "kind": "feature-deletion",
        "split": removal.split,
        "family": f"{package.label}:{removal.family}",
        "package": package.label,
        "package_sha256": package.sha256,
        "removal": removal.kind,
        "difficulty": removal.difficulty,
        "removed": removal.names,
        **({"feature": removal.feature} if removal.feature else {}),
        "edits": [{"path": path, **asdict(edit)} for path, edit in edits],
        "twin": {"path": twin.path, **asdict(twin.edit)} if twin and twin.edit else None,
        "test_files": list(baseline.files),
        "options": options,
        "set_aside": list(hanging),
    }


def instance_id(package: Package, removal: Removal) -> str:
    """Return the id: package, first removed definition, and the identity of the removal."""
    first = removal.parts[0]
    suffix = f"-and-{len(removal.parts) - 1}-more" if len(removal.parts) > 1 else ""
    module = first.path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f"{package.label}.{module}.{first.qualname}{suffix}.{removal.identity}"


def make_twin(row: Mapping[str, Any]) -> Row:
    """Return the impossible variant: the same description and lists, and a test that contradicts them."""
    # Only id and family differ: `delivered_files` and the grader derive the rest from the suffix of the id.
    return {**row, "instance_id": row["instance_id"] + TWIN, "family": row["family"] + TWIN}


def test_lists(row: Mapping[str, Any]) -> TestLists:
    """Return the lists of a row: tests to fix, and tests that must keep passing."""
    # skip_fails: removed code is what the tests import, so a solution could raise pytest.skip in it.
    return replace(lists_of(row), skip_fails=True)


def delivered_files(row: Mapping[str, Any], package: Package) -> trees.Changes:
    """Return the files that an agent finds changed: without the removed code, and for a twin one contradicted test."""
    files = _edited_files(package, row["edits"])
    return files | _edited_files(package, [row["twin"]]) if row["instance_id"].endswith(TWIN) else files


def _edited_files(package: Package, edits: Iterable[Mapping[str, Any]]) -> trees.Changes:
    """Return the package's files after edits; `BadInput` where a file does not exist."""
    by_path: dict[str, list[Edit]] = {}
    for edit in edits:
        by_path.setdefault(edit["path"], []).append(Edit(edit["first"], edit["last"], tuple(edit["lines"])))
    files: trees.Changes = {}
    for path, changes in by_path.items():
        file = trees.read(package.root, path)
        if file is None:
            raise BadInput("envs.feature_deletion.edited-file-missing", package=package.label, path=path)
        files[path] = trees.TreeFile(apply_edits(file.data.decode(), changes).encode(), file.mode)
    return files
