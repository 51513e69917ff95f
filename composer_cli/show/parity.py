"""`composer parity`: how many recorded cases of each version still give the same numbers, and the reason for others."""

from typing import Any

from stages.checkout import add_to_path


def check_kernels() -> dict[str, Any]:
    """Run our loss kernels on every recorded case; `same` when there are records and no case drifted."""
    add_to_path("tests/parity")
    from parity.check import GOLDEN, check_file  # type: ignore[import-not-found,unused-ignore]

    files = {file.name: check_file(file) for file in sorted(GOLDEN.glob("*.json"))}
    versions = [_version(name, None, results) for name, results in files.items()]
    same = bool(files) and not any(version["drifted"] for version in versions)
    return {"of": "kernels", "commit": None, "versions": versions, "same": same}


def compare_upstream(against: str) -> dict[str, Any]:
    """Run upstream's functions in a clone on its recorded cases; `same` when they match one recorded version."""
    add_to_path("tests/parity")
    from parity.against import compare  # type: ignore[import-not-found,unused-ignore]

    found = compare(against)
    versions = [_version(version.file, version.commit, version.results) for version in found.versions]
    return {"of": found.repo, "commit": found.commit, "versions": versions, "same": found.same}


def _version(file: str, commit: str | None, results: Any) -> dict[str, Any]:
    failed = [{"case": result.case, "reason": result.reason} for result in results if result.status == "failed"]
    return {"file": file, "recorded_at": commit, "cases": len(results), "drifted": failed}


def page(found: dict[str, Any]) -> str:
    """Return a comparison as text: a line for each recorded version, and one for each case that drifted."""
    lines = [f"{found['of']}{' at ' + found['commit'] if found['commit'] else ''}"]
    for version in found["versions"]:
        at = f", recorded at {version['recorded_at'][:9]}" if version["recorded_at"] else ""
        same = version["cases"] - len(version["drifted"])
        lines.append(f"  {version['file']}{at}: {same} of {version['cases']} as recorded")
        lines += [f"    {row['case']}: {row['reason']}" for row in version["drifted"]]
    lines.append("as recorded" if found["same"] else "not as recorded")
    return "\n".join(lines)
