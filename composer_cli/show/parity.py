"""`composer parity`: how many recorded cases of each version still give the same numbers, and the reason for others."""

from typing import Any

from stages.checkout import add_to_path


def compare(against: str | None) -> dict[str, Any]:
    """Run our loss kernels on every recorded case, or upstream's functions in the clone `against` on its own cases.

    `same`: there are records and no case of our kernels drifted; upstream's functions match one recorded version.
    """
    # Records and checks are in the checkout alone: an installed Composer has no tests.
    add_to_path("tests/parity")
    from parity import against as upstream  # type: ignore[import-not-found,unused-ignore]
    from parity.check import GOLDEN, check_file  # type: ignore[import-not-found,unused-ignore]

    found = upstream.compare(against) if against else None
    if found:
        recorded = [(version.file, version.commit, version.results) for version in found.versions]
    else:
        recorded = [(file.name, None, check_file(file)) for file in sorted(GOLDEN.glob("*.json"))]
    versions: list[dict[str, Any]] = []
    for file, commit, results in recorded:
        failed = [{"case": one.case, "reason": one.reason} for one in results if one.status == "failed"]
        versions.append({"file": file, "recorded_at": commit, "cases": len(results), "drifted": failed})
    if found:
        return {"of": found.repo, "commit": found.commit, "versions": versions, "same": found.same}
    same = bool(versions) and not any(version["drifted"] for version in versions)
    return {"of": "kernels", "commit": None, "versions": versions, "same": same}


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
