"""What `composer parity` found: a row for each recorded version, and a sentence for each case that is another."""

import sys
from pathlib import Path
from typing import Any

import stages
from stages.errors import UsageError

Facts = dict[str, Any]


def kernels() -> Facts:
    """Our kernels on every recorded case."""
    _add_to_path()
    from parity.check import GOLDEN, check_file  # type: ignore[import-not-found,unused-ignore]

    files = {file.name: check_file(file) for file in sorted(GOLDEN.glob("*.json"))}
    versions = [_version(name, None, results) for name, results in files.items()]
    return {"of": "kernels", "commit": None, "versions": versions, "same": bool(files) and not _drifts(versions)}


def upstream(against: str) -> Facts:
    """Upstream's functions in a clone on its recorded cases; the same when they are as one recorded version."""
    _add_to_path()
    from parity.against import compare  # type: ignore[import-not-found,unused-ignore]

    found = compare(against)
    versions = [_version(version.file, version.commit, version.results) for version in found.versions]
    return {"of": found.repo, "commit": found.commit, "versions": versions, "same": found.same}


def _add_to_path() -> None:
    """Make tests/parity importable: it belongs to the checkout, not to an installed package."""
    tests = Path(stages.__file__).parents[1] / "tests"
    if not (tests / "parity" / "golden").is_dir():
        raise UsageError(f"There are no recorded numbers in {tests.parent}. Run this in a checkout.")
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))


def _version(file: str, commit: str | None, results: Any) -> Facts:
    failed = [{"case": result.case, "reason": result.reason} for result in results if result.status == "failed"]
    return {"file": file, "recorded_at": commit, "cases": len(results), "drifted": failed}


def _drifts(versions: list[Facts]) -> bool:
    return any(version["drifted"] for version in versions)


def page(found: Facts) -> str:
    """The same for people."""
    lines = [f"{found['of']}{' at ' + found['commit'] if found['commit'] else ''}"]
    for version in found["versions"]:
        at = f", recorded at {version['recorded_at'][:9]}" if version["recorded_at"] else ""
        same = version["cases"] - len(version["drifted"])
        lines.append(f"  {version['file']}{at}: {same} of {version['cases']} as recorded")
        lines += [f"    {row['case']}: {row['reason']}" for row in version["drifted"]]
    lines.append("as recorded" if found["same"] else "not as recorded")
    return "\n".join(lines)
