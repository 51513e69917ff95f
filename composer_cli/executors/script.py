"""A chain as a shell script. Files that lie here go along by their text, so that what was submitted is what runs."""

import hashlib
import shlex
from collections.abc import Mapping

from composer_cli.executors.base import Chain, Where


def script(chain: Chain, where: Where, *, python: str, artifacts: str, head: str = "", supervise: str = "") -> str:
    """The whole text.

    head: lines for a scheduler behind the first one. supervise: shell that runs the chain, whose command is in "$@";
    without it the chain takes the shell's place, and so gets its signals.
    """
    lines = ["#!/bin/sh", head, "set -eu", "files=$(mktemp -d); export files", *map(_file, chain.files.items())]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in where.env.items()]
    lines += [where.setup, f"set -- {_command(chain, python, artifacts)}", supervise or 'exec "$@"']
    return "\n".join(line for line in lines if line) + "\n"


def _command(chain: Chain, python: str, artifacts: str) -> str:
    words = [shlex.quote(python), "-m", "composer_cli", *(_word(word, chain.files) for word in chain.words)]
    return " ".join([*words, "--resume", "--artifacts", shlex.quote(artifacts)])


def _word(word: str, files: Mapping[str, str]) -> str:
    return f'"$files"/{word}' if word in files else shlex.quote(word)


def _file(item: tuple[str, str]) -> str:
    name, text = item
    end = f"END_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    newline = "" if text.endswith("\n") else "\n"
    return f"cat > \"$files\"/{name} <<'{end}'\n{text}{newline}{end}"
