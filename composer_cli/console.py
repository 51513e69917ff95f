"""What people see on stderr while work goes on: bars on a terminal, elsewhere one line every 30 seconds."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from composer_cli.printing import say, visible

if TYPE_CHECKING:
    from rich.progress import TaskID

    from composer_cli.show.follow import Views

HEARTBEAT_S = 30.0
STOPPING = "Finishing what has begun, then stopping. Ctrl-C again stops at once."
Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on how things stand."""
Place = Callable[[], Path | None]


class Watch(Protocol):
    """Shows the progress of one or several pieces of work, each with a title."""

    def listener(self, title: str, place: Place | None = None) -> Listener:
        """What the work with this title reports to; `place` gives the folder of its run, once there is one."""
        ...

    def ended(self, title: str) -> None:
        """Nothing more will come of it."""
        ...


class Console:
    """Speaks to people, unless they want quiet. watch: also show what goes on inside the runs."""

    def __init__(self, quiet: bool = False, heartbeat_s: float = HEARTBEAT_S, watch: bool = False) -> None:
        self.quiet, self.heartbeat_s, self.watch = quiet, heartbeat_s, watch

    def tell(self, text: str) -> None:
        """One line on stderr."""
        if not self.quiet:
            say(text)

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Show progress until the block ends; what libraries print goes to stderr, since stdout is for results."""
        with redirect_stdout(sys.stderr), announcing_interrupts(self.tell):
            if self.quiet:
                yield Silence()
            else:
                with (
                    self._views() as views,
                    Bars(views) if sys.stderr.isatty() else Heartbeat(self.heartbeat_s, views) as watch,
                ):
                    yield watch

    @contextmanager
    def _views(self) -> Iterator["Views | None"]:
        """What goes on inside the runs, where that is wanted."""
        if not self.watch:
            yield None
            return
        from composer_cli.show.follow import Views

        with Views() as views:
            yield views


@contextmanager
def announcing_interrupts(tell: Callable[[str], None]) -> Iterator[None]:
    """Say what the first Ctrl-C or SIGTERM does where a stage handles it; where none does yet, it stops at once."""
    from stages.runs.signals import interrupted

    def announce(signum: int, frame: object) -> None:
        if signal.getsignal(signum) is announce:
            raise interrupted(signum)
        tell(stopping(signum))

    previous = {number: signal.signal(number, announce) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stopping(signum: int) -> str:
    """What happens after the first signal."""
    return STOPPING if signum == signal.SIGINT else f"{signal.Signals(signum).name}: {STOPPING}"


class Silence:
    """Shows nothing."""

    def listener(self, title: str, place: Place | None = None) -> Listener:
        """Hears and says nothing."""
        return lambda what, done, total: None

    def ended(self, title: str) -> None:
        """Says nothing."""


class Heartbeat:
    """A line every so often, also when nothing finished since the last."""

    def __init__(self, every_s: float, views: "Views | None" = None) -> None:
        self._views = views
        self._every_s, self._started, self._over = every_s, time.monotonic(), threading.Event()
        self._latest: dict[str, str] = {}
        self._remarks: dict[str, str] = {}
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def listener(self, title: str, place: Place | None = None) -> Listener:
        """Remembers how far the work is."""
        pace = Pace()
        if self._views and place:
            self._views.look(title, place)

        def listen(what: str, done: int, total: int) -> None:
            if total:
                self._latest[title] = f"{done} of {total} {what}{pace.left(what, done, total)}"
            self._remarks[title] = "" if total else what

        self._latest[title] = "nothing finished yet"
        return listen

    def ended(self, title: str) -> None:
        """No more lines about it."""
        if self._views:
            self._views.away(title)
        self._latest.pop(title, None)
        self._remarks.pop(title, None)

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            about = [(title, text, self._remarks.get(title)) for title, text in list(self._latest.items())]
            state = "; ".join(f"{title}: {text}{f' ({remark})' if remark else ''}" for title, text, remark in about)
            say(f"{state}, after {duration(time.monotonic() - self._started)}")
            for view in self._views.texts() if self._views else []:
                say(view)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


class Pace:
    """How long the rest of what is counted will take, at the pace since it was first heard of."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._first = clock, dict[str, tuple[float, int]]()

    def left(self, what: str, done: int, total: int) -> str:
        """`, about 3 min 20 s left`; empty before anything is finished and when all is."""
        now = self._clock()
        started, before = self._first.setdefault(what, (now, done))
        if done <= before or done >= total:
            return ""
        return f", about {duration((now - started) / (done - before) * (total - done))} left"


class Bars:
    """A bar on the terminal for everything that is counted, and a line for remarks."""

    def __init__(self, views: "Views | None" = None) -> None:
        from rich.console import Console as Terminal
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.text import Text

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress, self._views = Progress(*columns), views
        self._live = Live(
            get_renderable=lambda: Group(
                self._progress, *(Text(visible(view)) for view in (views.texts() if views else []))
            ),
            console=Terminal(stderr=True),
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def listener(self, title: str, place: Place | None = None) -> Listener:
        """Draws a bar for each thing that the work counts; one that only pulses for what is not counted."""
        self._say(title, "starting")
        if self._views and place:
            self._views.look(title, place)

        def listen(what: str, done: int, total: int) -> None:
            if not total:
                self._say(title, what)
                return
            if (title, "") in self._tasks:
                self._progress.remove_task(self._tasks.pop((title, "")))
            if (title, what) not in self._tasks:
                self._tasks[title, what] = self._add(f"{title}: {what}", total)
            self._progress.update(self._tasks[title, what], completed=done, total=total, count=f"{done}/{total}")

        return listen

    def _say(self, title: str, remark: str) -> None:
        if (title, "") not in self._tasks:
            self._tasks[title, ""] = self._add("", None)
        self._progress.update(self._tasks[title, ""], description=visible(f"{title}: {remark}"))

    def _add(self, description: str, total: int | None) -> "TaskID":
        return self._progress.add_task(visible(description), total=total, count="")

    def ended(self, title: str) -> None:
        """Takes its bars away."""
        if self._views:
            self._views.away(title)
        for key in [key for key in self._tasks if key[0] == title]:
            self._progress.remove_task(self._tasks.pop(key))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def duration(seconds: float) -> str:
    """Wall time for people: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
