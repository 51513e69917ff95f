"""A Dockerfile as far as it can be followed without an engine: a Python, files, folders and variables.

In bubblewrap the programs are this machine's. So a Dockerfile is followed only if all that it asks for is there: it
begins with a Python, Debian or Ubuntu image, copies files of its folder, sets variables and the working folder, makes
folders, and installs at most packages whose programs the sandbox shows. Everything else is refused with its line.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath

from composer_stages import json_text
from composer_stages.errors import Refusal

IMAGES = re.compile(r"^(python|debian|ubuntu|buildpack-deps|composer-[\w.-]+)(:[\w.-]+)?(@sha256:\w+)?$")
"""The last part of an image's name: those whose programs are a Python and a shell."""
IGNORED = frozenset({"LABEL", "EXPOSE", "MAINTAINER", "CMD", "STOPSIGNAL"})
"""Instructions that change nothing here: a container of Harbor has a command that only waits."""
PIP = re.compile(r"(pip3?|python3? -m pip) install( -\S+| --\S+)*(?P<names>( [\w.-]+([=<>~!]=?[\w.*]+)?)+)$")
IMPORT = re.compile(r"python3? -c ['\"]import(?P<names>( \w+)+)['\"]( 2>\s*/dev/null)?$")
APT = re.compile(r"apt(-get)? (update|clean|(-\S+ )*install( -\S+)*(?P<names>( [\w.+-]+)+))( -\S+)*$")
PIP_NAMES = frozenset({"pytest", "pluggy", "iniconfig", "packaging", "pygments"})
"""Distributions that the sandbox shows, in the versions of this installation."""
APT_NAMES = frozenset({"python3", "python3-pytest", "bash", "coreutils", "git", "ca-certificates", "grep", "sed"})
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the programs of an image are, before a Dockerfile adds to it."""
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?)([-+])([^${}\"'\\]*))?\})")
OTHER_SHELL = re.compile(r"^echo\b.*(?:\\| -[a-z]*[eE])|^printf\b.*\\x|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}|&>")
"""What `sh` of these images (dash) and the sandbox's do otherwise."""
FILES_ONLY = re.compile(r"(mkdir|touch|chmod|ln|cp|mv|echo|printf)\b|rm -rf? /var/lib/apt/lists/\*$|(true|:)$")
"""Commands of RUN that are carried out in the sandbox, or concern what it does not have."""


class NotFollowed(Refusal):
    """A Dockerfile needs an engine; the text is the line and the reason."""


@dataclass(frozen=True)
class CopiedFiles:
    """One COPY or ADD: patterns below the context, the absolute target, and whether archives are unpacked."""

    patterns: tuple[str, ...]
    target: str
    into_folder: bool
    unpacks: bool
    mode: int | None = None


@dataclass
class DockerRecipe:
    """The steps of a Dockerfile, in order. commands: shell commands with the folder that they are run in."""

    image: str = ""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    steps: list["CopiedFiles | tuple[str, str]"] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    """Absolute folders that are made or copied into."""


def follow_dockerfile(text: str, context: Path) -> DockerRecipe:
    """Parse a Dockerfile into the steps that bubblewrap can follow; `NotFollowed` where it needs an engine."""
    recipe = DockerRecipe()
    for line, word, arguments in read_instructions(text):
        if word == "FROM":
            if recipe.image:
                raise NotFollowed("envs.harbor.several-stages", line=line)
            named = [each for each in arguments.split() if not each.startswith("--platform=")]
            recipe.image = named[0] if named else ""
            if not IMAGES.match(recipe.image.rpartition("/")[2]):
                raise NotFollowed("envs.harbor.foreign-image", line=line, image=recipe.image)
        elif word == "WORKDIR":
            recipe.workdir = absolute_path(_expand(arguments, recipe.env, line), recipe.workdir)
            recipe.folders.append(recipe.workdir)
        elif word == "ENV":
            recipe.env |= _parse_variables(arguments, recipe.env, line)
        elif word in ("COPY", "ADD"):
            copied = _parse_copy(word, arguments, line, recipe, context)
            recipe.steps.append(copied)
            into = copied.into_folder or copied.target in recipe.folders
            recipe.folders.append(copied.target if into else str(PurePosixPath(copied.target).parent))
        elif word == "RUN":
            if commands := _parse_run(arguments, line):
                recipe.steps.append((commands, recipe.workdir))
                recipe.folders += [absolute_path(path, recipe.workdir) for path in _written_folders(commands, line)]
        elif word not in IGNORED:
            raise NotFollowed("envs.harbor.instruction-not-followed", line=line, word=word)
    if not recipe.image:
        raise NotFollowed("envs.harbor.no-from")
    return recipe


def read_instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the instructions of a Dockerfile: line, word in capitals, and the rest with its continuations."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue  # also between the lines of one instruction
        start = start if pending else number
        pending += line.strip() if not pending else f" {line.strip()}"
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip()
            continue
        word, _, arguments = pending.partition(" ")
        yield start, word.upper(), arguments.strip()
        pending = ""
    if pending:
        word, _, arguments = pending.partition(" ")
        yield start, word.upper(), arguments.strip()


def base_images(text: str) -> list[str]:
    """Return the base images of a Dockerfile's stages, without earlier stages and names that an ARG gives."""
    named, images = {"scratch"}, []
    for _, word, arguments in read_instructions(text):
        if word == "FROM":
            words = [argument for argument in arguments.split() if not argument.startswith("--")]
            if words and words[0] not in named and "$" not in words[0]:
                images.append(words[0])
            if len(words) == 3 and words[1].upper() == "AS":
                named.add(words[2])
    return list(dict.fromkeys(images))


def absolute_path(path: str, workdir: str) -> str:
    """Resolve a path of a Dockerfile from the working folder, `..` by its text."""
    return "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")


def _expand(text: str, env: Mapping[str, str], line: int) -> str:
    """Return a word of a Dockerfile without its quotes and with its variables, as BuildKit's lexer reads it.

    A variable that is not set is empty. `NotFollowed` for other forms of variables, and for a quote that does not end.
    Source: `frontend/dockerfile/shell/lex.go` of moby/buildkit.
    """
    written, at, quote = list[str](), 0, ""
    while at < len(text):
        char, behind = text[at], text[at + 1 : at + 2]
        at += 1
        if char == quote:
            quote = ""
        elif quote == "'":
            written.append(char)
        elif char == "\\":
            keeps = quote and behind not in ('"', "$", "\\")
            written.append(char if keeps else behind)
            at += not keeps
        elif char in "\"'" and not quote:
            quote = char
        elif char == "$" and (match := VARIABLE.match(text, at - 1)):
            plain, name, colon, operator, word = match.groups()
            value, at = env.get(plain or name), match.end()
            is_set = bool(value) if colon else value is not None
            choices = {"-": value if is_set else word, "+": word if is_set else "", None: value}
            written.append(choices[operator] or "")
        elif char == "$" and re.match(r"[\w{(@*#?!$-]", behind):
            raise NotFollowed("envs.harbor.variable-not-followed", line=line, word=text[:60])
        else:
            written.append(char)
    if quote:
        raise NotFollowed("envs.harbor.quote-not-closed", line=line, word=text[:60])
    return "".join(written)


def _words(text: str) -> list[str]:
    """Return the words of a line with their quotes, parted by blanks outside of quotes."""
    return re.findall(r"""(?:\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^\s\\])+|\\$""", text)


def _parse_variables(arguments: str, env: Mapping[str, str], line: int) -> dict[str, str]:
    """Parse the variables of one ENV, in either of its forms; each sees those of earlier instructions."""
    words, env = _words(arguments), {"PATH": IMAGE_PATH} | dict(env)
    if words and "=" not in words[0]:
        return {words[0]: _expand(arguments.partition(" ")[2].strip(), env, line)}
    pairs = (word.split("=", 1) for word in words if "=" in word)
    return {_expand(name, env, line): _expand(value, env, line) for name, value in pairs}


def _parse_copy(word: str, arguments: str, line: int, recipe: DockerRecipe, context: Path) -> CopiedFiles:
    """Parse one COPY or ADD."""
    mode = None
    while flag := re.match(r"--(\w+)(?:=(\S+))?\s+", arguments):
        if flag[1] == "chmod" and re.fullmatch(r"0?[0-7]{3}", flag[2] or ""):
            mode = int(flag[2], 8)
        elif flag[1] not in ("chown", "link"):
            raise NotFollowed("envs.harbor.flag-not-followed", line=line, word=word, flag=flag[1])
        arguments = arguments[flag.end() :]
    try:
        paths = json_text.loads(arguments) if arguments.startswith("[") else _words(arguments)
    except ValueError as error:
        raise NotFollowed(f"line {line}: {error}") from None
    paths = [_expand(path, recipe.env, line) for path in paths]
    if len(paths) < 2 or "<<" in arguments or any("://" in path or path.startswith("git@") for path in paths):
        raise NotFollowed("envs.harbor.copies-more-than-files", line=line, word=word)
    *sources, target = paths
    patterns = tuple(absolute_path(path, "/").lstrip("/") for path in sources)
    into = len(sources) > 1 or target.endswith(("/", "/.")) or target in (".", "..")
    into = into or (context / patterns[0]).is_dir()  # the content of a folder goes into one, however it is written
    return CopiedFiles(patterns, absolute_path(target, recipe.workdir), into, word == "ADD", mode)


def _parse_run(arguments: str, line: int) -> str:
    """Return the commands of one RUN to run in the sandbox, without installing packages that it has."""
    if arguments.startswith(("[", "--")) or "<<" in arguments or re.search(r"[`$]|(?<!\|)\|(?!\|)", arguments):
        raise NotFollowed("envs.harbor.run-not-followed", line=line, command_=arguments[:60])
    carried_out = []
    for alternatives in re.split(r"\s*(?:&&|;)\s*", arguments):
        commands = re.split(r"\s*\|\|\s*", alternatives)
        if _is_available(commands[0], line):
            continue  # it succeeds, so that no alternative is run
        for command in commands:
            if not FILES_ONLY.match(command) or OTHER_SHELL.search(command):
                raise NotFollowed("envs.harbor.run-not-followed", line=line, command_=command[:60])
        if not commands[0].startswith("rm "):
            carried_out.append(" || ".join(commands))
    return " && ".join(carried_out)


def _written_folders(commands: str, line: int) -> Iterator[str]:
    """Yield the folders that commands of RUN make or write into."""
    for command in re.split(r"\s*(?:&&|\|\|)\s*", commands):
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            tokens = list(lexer)
        except ValueError as error:
            raise NotFollowed(f"line {line}: {error}") from None
        if "&" in tokens:  # something else goes on behind it
            raise NotFollowed("envs.harbor.run-not-followed", line=line, command_=command[:60])
        files, words = list[str](), list[str]()
        for before, token in zip(["", *tokens], tokens, strict=False):
            into = before.strip("&|") in (">", ">>", "<>")
            if into and not (before.endswith("&") and token.isdigit()) and not token.startswith("/dev/"):
                files.append(token)
            if not into and not token.startswith("-") and not set(token) & set("<>&"):
                words.append(token)
        program, *arguments = words
        files += arguments[1:] if program == "chmod" else arguments[-1:] if program in ("cp", "ln") else ()
        files += arguments if program in ("touch", "mv") else ()
        folders = arguments if program == "mkdir" else ()
        for path in (*folders, *(file if file.endswith("/") else str(PurePosixPath(file).parent) for file in files)):
            yield path.replace("~", "/root", 1) if path.startswith("~") else path


def _is_available(command: str, line: int) -> bool:
    """Return whether a command installs or imports packages that the sandbox has; `NotFollowed` for another version."""
    for pattern, available in ((PIP, PIP_NAMES), (IMPORT, PIP_NAMES), (APT, APT_NAMES)):
        if (match := pattern.match(command)) is None:
            continue
        requirements = [re.split(r"([=~]=)", name) for name in (match["names"] or "").split()]
        if not {re.split(r"[<>!]", requirement[0])[0].lower() for requirement in requirements} <= available:
            continue
        for name, _, pinned in (
            requirement for requirement in requirements if pattern is PIP and len(requirement) == 3
        ):
            # With another one a right solution may fail: pytest 9 refuses a conftest that pytest 8 takes.
            if metadata.version(name).partition(".")[0] != pinned.partition(".")[0]:
                installed = f"{name} {metadata.version(name)}"
                raise NotFollowed("envs.harbor.other-version", line=line, name=name, pinned=pinned, installed=installed)
        return True
    return False
