"""What every benchmark is run with: its cases from the command line, processes of their own, memory, missing peers.

A benchmark is a script in this folder with cases, functions that yield claims (`records.measured`), and ends in

    CASES = {"dpo": dpo, "grpo": grpo}

    if __name__ == "__main__":
        cases.main(__file__, CASES)

A case's parameters are its options on the command line, their annotations the types, its docstring the help.
"""

import argparse
import asyncio
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent / "tests")]
import records

EXTRA = "python -m pip install -c constraints.txt -e '.[{}]'"
Case = Callable[..., Iterable[records.Claim]]


def main(script: str, every: Mapping[str, Case], words: Sequence[str] | None = None) -> None:
    """Run the case that is named; print its claims and keep them in the script's record.

    Without a name, all cases are run that need no arguments. A script of one case has no names. Ends with exit code 1
    where a goal was missed. words: of the command line, those of this process by default.
    """
    asked = _parser(script, every).parse_args(words)
    options = vars(asked)
    chosen = options.pop("case", None)
    missed = False
    for name, case in every.items():
        if chosen == name or (chosen is None and (len(every) == 1 or not _required(case))):
            for claim in case(**options):
                records.write(script, [claim])
                missed |= claim.outcome == "missed"
                print(
                    f"{claim.claim}: {claim}" + (f", goal {claim.goal}: {claim.outcome}" if claim.goal else ""),
                    flush=True,
                )
    sys.exit(missed)


def _parser(script: str, every: Mapping[str, Case]) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    about = inspect.getdoc(sys.modules["__main__"])
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{Path(script).name}", description=about, formatter_class=raw
    )
    if len(every) == 1:
        _add_options(parser, *every.values())
        return parser
    cases = parser.add_subparsers(
        dest="case", metavar="CASE", help=f"{', '.join(every)}; all that need no arguments, if none is named"
    )
    for name, case in every.items():
        _add_options(cases.add_parser(name, description=inspect.getdoc(case), formatter_class=raw), case)
    return parser


def _required(case: Case) -> list[str]:
    parameters = inspect.signature(case).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _add_options(parser: argparse.ArgumentParser, case: Case) -> None:
    """Add an option for each parameter of a case; those without a default are positional."""
    for name, parameter in inspect.signature(case, eval_str=True).parameters.items():
        of, given = parameter.annotation, dict[str, Any]()
        if get_origin(of) is types.UnionType:  # X | None
            of = get_args(of)[0]
        required = name in _required(case)
        if get_origin(of) is tuple:
            of, given["nargs"] = get_args(of)[0], "+" if required else "*"
        if get_origin(of) is Literal:
            given["choices"], of = get_args(of), str
        if of is bool:
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        elif required:
            parser.add_argument(name, type=of, **given)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=of, default=parameter.default, **given)


def needed(*modules: str, by: str = EXTRA.format("bench")) -> None:
    """Exit with one sentence and code 2 where a peer is not installed; `by` is the command that installs it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        print(f"{sys.argv[0]} needs {', '.join(missing)}, which {verb} not installed. Type: {by}", file=sys.stderr)
        sys.exit(2)


def call(function: Callable[..., Any], arguments: Iterable[Any], python: str = sys.executable) -> list[str]:
    """Return the command that calls a function of a script in another interpreter, and prints its result as JSON."""
    module = Path(function.__code__.co_filename).stem
    code = f"import json, sys; sys.path.insert(0, {str(FOLDER)!r}); import {module}; "
    code += f"print(json.dumps({module}.{function.__name__}(*json.loads(sys.argv[1]))))"
    return [python, "-c", code, json.dumps(list(arguments), default=str)]


def apart(function: Callable[..., Any], *arguments: Any, python: str = sys.executable, **environment: str) -> Any:
    """Call a function of a script in a process of its own, and return its result; arguments and result are JSON.

    What the function prints is lost. environment: variables on top of those of this process.
    """
    words, variables = call(function, arguments, python), {**os.environ, **environment}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def serving(function: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    """Run a server, a function of a script that prints its port, in a process of its own; yield the address of its API.

    The function returns once its standard input is closed.
    """
    words = call(function, arguments)
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
    finally:
        server.communicate()


def say(**told: Any) -> None:
    """Print what was found as a line of JSON."""
    print(json.dumps(told), flush=True)


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return seconds of processor time of each in every round, run in turn; print the medians.

    warm_up: rounds before these, which are left out.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + warm_up):
        for name, run in runs.items():
            started = time.process_time()
            run()
            if number >= warm_up:
                times[name].append(time.process_time() - started)
    for name, seconds in times.items():
        print(f"{name:<20}{1000 * statistics.median(seconds):>9.1f} ms", flush=True)
    return times


def answer_requests(respond: Callable[[bytes, Callable[[bytes], None]], None]) -> None:
    """Answer HTTP requests with JSON until the standard input is closed; the port is printed first.

    respond: gets the body of a request, and what sends the answer to it, now or later.
    """

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.held = transport, b""

        def data_received(self, data: bytes) -> None:
            self.held += data
            head, end, rest = self.held.partition(b"\r\n\r\n")
            if not end:
                return
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(rest) >= length:
                self.held = rest[length:]
                respond(rest[:length], self.send)

        def send(self, body: bytes) -> None:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            self.transport.write(head + body)

    async def forever() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()

    asyncio.run(forever())


def memory(field: Literal["VmRSS", "VmHWM", "RssAnon"], process: int | Literal["self"] = "self") -> int:
    """Return bytes of a process: resident now, at most so far, now without mapped files. Source: Linux, proc(5)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()  # a process that has ended has no such line
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
