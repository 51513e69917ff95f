"""Repositories that the user keeps: one git mirror each, read without changing it."""

from pathlib import Path

from stages.envs.repo import trees
from stages.errors import InfrastructureError, UsageError


def find(folder: Path, repo: str) -> Path | None:
    """The git directory of `owner/name` below a folder, bare or checked out: owner__name, owner/name or name."""
    owner, _, name = repo.partition("/")
    for stem in (f"{owner}__{name}", f"{owner}/{name}", name):
        for path in (folder / stem, folder / f"{stem}.git", folder / stem / "repo"):
            for git in (path / ".git", path):
                if (git / "objects").is_dir() and (git / "HEAD").exists():
                    return git
    return None


def required(folder: Path, repo: str) -> Path:
    """The git directory, or a refusal that says how to make it."""
    mirror = find(folder, repo)
    if mirror is None:
        name = repo.replace("/", "__")
        raise UsageError(
            f"There is no mirror of {repo} in {folder} (`composer swe check` tells what else is lacking; "
            "`--env swe-mini` needs none). Make it with: "
            f"git clone --mirror https://github.com/{repo} {folder}/{name}.git"
        )
    return mirror


def extract(mirror: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into an empty folder, through an index of its own: the mirror stays as it is.

    `InfrastructureError` where the mirror lacks the commit.
    """
    with trees.scratch() as beside:
        at = (f"--git-dir={mirror}", f"--work-tree={target}")
        index = {"GIT_INDEX_FILE": str(beside / "index")}
        try:
            trees.git(target, "-c", "safe.directory=*", *at, "read-tree", commit, env=index)
            trees.git(target, "-c", "safe.directory=*", *at, "checkout-index", "--all", "--force", env=index)
        except RuntimeError as error:
            raise InfrastructureError(
                f"The mirror {mirror} does not give commit {commit}: {error}. Fetch it again."
            ) from None


def patched(base: Path, patch: str) -> trees.Changes:
    """What a patch makes of the files that it touches. `InfrastructureError` when it does not apply to `base`."""
    with trees.scratch() as work:
        for path in touched(patch):
            if file := trees.read(base, path):
                trees.apply({path: file}, work)
        before = {path: trees.read(work, path) for path in trees.walk(work)}
        (work / ".patch").write_text(patch)
        try:
            trees.git(work, "apply", "--whitespace=nowarn", ".patch")
        except RuntimeError as error:
            raise InfrastructureError(f"The patch does not apply to the base commit: {error}.") from None
        (work / ".patch").unlink()
        after = {path: trees.read(work, path) for path in trees.walk(work)}
    return {path: after.get(path) for path in sorted({*before, *after}) if before.get(path) != after.get(path)}


def touched(patch: str) -> list[str]:
    """The paths that a patch changes, removes or creates."""
    heads = [line[4:] for line in patch.splitlines() if line.startswith(("--- ", "+++ "))]
    renamed = [line.split(" ", 2)[2] for line in patch.splitlines() if line.startswith(("rename from ", "rename to "))]
    named = [head.partition("\t")[0][2:] for head in heads if head.startswith(("a/", "b/"))]
    return list(dict.fromkeys([*named, *renamed]))
