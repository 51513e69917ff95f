"""Git repositories that tasks are commits of: where they are, which commits they hold, and the files of a commit.

They belong to the user, and are only read; no program that their configuration names is run.
"""

import hashlib
import os
import threading
from pathlib import Path

from filelock import FileLock

from composer_stages.envs.repo import trees
from composer_stages.errors import InfrastructureError

CLONES = Path("~/.cache/composer/tasks")
ADDRESSES = ("https://", "http://", "ssh://", "git://", "file://", "git@")
_cloning = threading.Lock()


def is_address(repository: str) -> bool:
    """Return whether a repository is cloned, and not read on this machine."""
    return repository.startswith(ADDRESSES)


def git_directory(folder: Path) -> Path | None:
    """Return the git directory of a repository, bare or checked out, or of a further working tree; None without one."""
    for path in (folder / ".git", folder):
        if (path / "objects").is_dir() and (path / "HEAD").exists():
            return path
    # Of a working tree (`git worktree`) or a submodule, .git is a file that names its own part of the repository.
    pointer = folder / ".git"
    text = pointer.read_text(errors="replace") if pointer.is_file() else ""
    if not text.startswith("gitdir: "):
        return None
    own = folder / text.removeprefix("gitdir: ").strip()
    common = own / (own / "commondir").read_text().strip() if (own / "commondir").is_file() else own
    return common.resolve() if (common / "objects").is_dir() else None


def has_commit(repository: Path, commit: str) -> bool:
    """Return whether a git directory holds a commit."""
    try:
        # safe.directory: git refuses a repository that another user owns, as a shared mirror may be.
        at = ("-c", "safe.directory=*", f"--git-dir={repository}")
        trees.git(repository, *at, "cat-file", "-e", f"{commit}^{{commit}}")
    except RuntimeError:
        return False
    return True


def check_out(repository: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into an empty folder, as git checks them out; `RuntimeError` where it cannot.

    Not `git archive`, which leaves out files and fills in lines as `.gitattributes` says. The index is a separate one.
    """
    with trees.scratch() as room:
        # Only the objects are read: the repository's configuration may name programs to run as filters.
        trees.git(room, "init", "--quiet", "--bare", "--template=", "empty.git")
        # In a file: a variable of the environment is cut at colons, which a path may have.
        alternates = room / "empty.git" / "objects" / "info" / "alternates"
        alternates.parent.mkdir(exist_ok=True)
        alternates.write_text(f"{(repository / 'objects').absolute()}\n")
        env = {"GIT_INDEX_FILE": str(room / "index")}
        at = (f"--git-dir={room / 'empty.git'}", f"--work-tree={target}")
        trees.git(target, *at, "read-tree", commit, env=env)
        trees.git(target, *at, "checkout-index", "--all", "--force", env=env)


def clone(address: str, commit: str) -> Path:
    """Return a clone of a repository, which is made once on this machine and fetched again for a commit that it lacks.

    `InfrastructureError` where that fails.
    """
    clones = CLONES.expanduser()
    mirror = clones / hashlib.sha256(address.encode()).hexdigest()[:16]
    clones.mkdir(parents=True, exist_ok=True)
    with _cloning, FileLock(f"{mirror}.lock"):  # of threads, and of processes
        try:
            if not (mirror / "HEAD").is_file():
                with trees.scratch() as room:
                    trees.git(room, "clone", "--quiet", "--mirror", "--", address, str(room / "clone"))
                    os.rename(room / "clone", mirror)
            elif not has_commit(mirror, commit):
                trees.git(mirror, "fetch", "--quiet", "origin")
        except (RuntimeError, OSError) as error:
            raise InfrastructureError("envs.repo.clone-failed", address=address, error=error) from None
    return mirror
