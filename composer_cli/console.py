"""Progress on stderr while stages work: bars on a terminal, elsewhere one line every 30 seconds.

In the first half minute, and while a small model is made on first use, a line comes every 10 seconds.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from composer_cli.printing import say
from composer_stages.errors import BadInput
from composer_stages.layout import duration, escape_control_characters
from composer_stages.runs.activity import Detailed, Figures, Notice, Preparation, repeating
from composer_stages.runs.run import Run
from composer_stages.stopping import on_signals
from composer_stages.words import Sentence

if TYPE_CHECKING:
    from rich.progress import TaskID

HEARTBEAT_S = 30.0
BEATS = 3
"""Beats in that time: the first of them all print a line, and so do those while something is prepared."""
VIEWS_S = 1.0
"""Between two readings of the runs for --watch."""
BEFORE = "importing libraries and checking the settings"
"""What a work does until it says something else."""
Listener = Callable[[str, int, int], None]
"""Called with (what, units done, units in all); with 0 in all, `what` is a remark on the state of the work."""
FindFolder = Callable[[], Path | None]
"""Returns the folder of a run, or None before the run has one."""


Watch: TypeAlias = "HeartbeatLines | Bars"
"""What shows the progress of one or several pieces of work, each with a title, from `listener` to `ended`."""


@dataclass(frozen=True)
class Console:
    """Prints remarks and progress unless `quiet`; with `watch` also what happens inside the runs."""

    quiet: bool = False
    heartbeat_s: float = HEARTBEAT_S
    watch: bool = False

    def notify(self, text: str) -> None:
        """Print one line on stderr."""
        if not self.quiet:
            say(text)

    def announce_stop(self, number: int) -> None:
        """Print what the first signal does while running units finish."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.notify(Sentence("cli.stopping", name=name))

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Show progress until the block ends; what libraries print goes to stderr, since stdout is for results."""
        with redirect_stdout(sys.stderr), on_signals(self.announce_stop):
            if self.quiet:
                yield HeartbeatLines(silent=True)
                return
            views = Views()
            with repeating(views.refresh, VIEWS_S) if self.watch else nullcontext():
                if sys.stderr.isatty():
                    bars = Bars(views)
                    with bars.live:
                        yield bars
                else:
                    lines = HeartbeatLines(views)
                    with repeating(lines.beat, self.heartbeat_s / BEATS):
                        yield lines


@dataclass
class Views:
    """Views of several runs under way, by the titles of the runs; `refresh` is called in a thread."""

    folders: dict[str, FindFolder] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """The newest view of each run, in the order in which the runs began."""

    def remove(self, title: str) -> None:
        """Stop showing this run."""
        self.folders.pop(title, None)
        self.texts.pop(title, None)

    def refresh(self) -> None:
        """Read all runs again."""
        from composer_cli.show.follow import view  # which reads tables: only --watch waits for its imports

        for title, find_folder in list(self.folders.items()):
            try:
                folder = find_folder()
                text = view(Run(folder)) if folder else ""
            except (BadInput, OSError):  # the run's folder is being made or cleaned up
                continue
            # The run may have been removed while it was read.
            if text and title in self.folders:
                self.texts[title] = text


@dataclass
class HeartbeatLines:
    """Progress of several works, printed in one line at each beat."""

    views: Views = field(default_factory=Views)
    started: float = field(default_factory=time.monotonic)
    counts: dict[str, Callable[[], str]] = field(default_factory=dict)
    """By title, how far the work is now; empty before something was counted."""
    figures: dict[str, str] = field(default_factory=dict)
    activities: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By title, what the work does, and since when."""
    newest: dict[str, str] = field(default_factory=dict)
    """By title, the newest activity, which may have ended."""
    preparing: set[str] = field(default_factory=set)
    """Titles of the works that count what comes before the work itself."""
    beats: int = 0
    silent: bool = False
    """Print nothing."""

    def listener(self, title: str, folder: FindFolder = lambda: None) -> Listener:
        """Return a listener that records the progress of a work for the next line."""
        pace = Pace()
        self.views.folders[title] = folder

        def listen(activity: str, done: int, total: int) -> None:
            if total:
                pace.left(activity, done, total)  # the first report starts the clock
                self.counts[title] = lambda: f"{done} of {total} {activity}{pace.left(activity, done, total)}"
                self.preparing -= {title}
                self.preparing |= {title} if isinstance(activity, Preparation) and done < total else set()
            if isinstance(activity, Figures):
                self.figures[title] = activity
            else:
                since = self.activities[title][1] if isinstance(activity, Detailed) else time.monotonic()
                self.activities[title] = "" if total else activity, since
                self.newest[title] = activity or self.newest.get(title, "")
            if isinstance(activity, Notice) and not self.silent:
                say(f"{title}: {activity}")

        self.counts[title] = lambda: ""
        listen(BEFORE, 0, 0)
        return listen

    def ended(self, title: str) -> None:
        """Remove a work from the lines."""
        self.views.remove(title)
        for by_title in (self.counts, self.figures, self.activities, self.newest):
            by_title.pop(title, None)
        self.preparing.discard(title)

    def beat(self) -> None:
        """Print a line if one is due."""
        self.beats += 1
        if self.beats <= BEATS or self.beats % BEATS == 0 or self.preparing:
            self.print_line()

    def print_line(self) -> None:
        """Print one line about all works, and the views of their runs. Called in a thread, hence the copies."""
        now, states = time.monotonic(), []
        for title, count in list(self.counts.items()):
            activity, since = self.activities.get(title, ("", now))
            begun, colon, more = activity.partition(": ") if isinstance(activity, Detailed) else (activity, "", "")
            parts = [self.figures.get(title, ""), activity and f"{begun} for {duration(now - since)}{colon}{more}"]
            counted, inside = count(), "; ".join(filter(None, parts))
            text = f"{counted} ({inside})" if counted and inside else counted or inside
            states.append(f"{title}: {text or f'done with {self.newest.get(title)}'}")
        say(f"{'; '.join(states)}, after {duration(now - self.started)}")
        for text in list(self.views.texts.values()):
            say(text)


@dataclass
class Pace:
    """Estimates how long the rest of the units takes, at the pace from their first report to the newest.

    Between two reports the estimate counts down. It is withheld once a unit takes longer than any before it: the last
    ones may be slow, and the pace of the others says nothing of them.

    min_s: seconds after which there is a pace. Before, one unit that was quick would promise the end at once.
    """

    clock: Callable[[], float] = time.monotonic
    min_s: float = 10.0
    first: dict[str, tuple[float, int]] = field(default_factory=dict)
    newest: dict[str, tuple[float, int, float]] = field(default_factory=dict)
    """When a unit finished last, how many had then, and the longest wait for one."""

    def left(self, units: str, done: int, total: int) -> str:
        """Return `, about 3 min 20 s left`; empty before there is a pace, after it, and when all is finished."""
        each, waited, longest = self._read(units, done)
        seconds = each * (total - done) - waited
        return f", about {duration(seconds)} left" if seconds >= 1 and waited <= longest else ""

    def rate(self, units: str, done: int) -> str:
        """Return `12 a second` or `3.5 a minute`; empty before there is a pace."""
        each, _, _ = self._read(units, done)
        return "" if not each else f"{1 / each:.3g} a second" if each <= 1 else f"{60 / each:.3g} a minute"

    def _read(self, units: str, done: int) -> tuple[float, float, float]:
        """Return the seconds of a unit, 0 without a pace, those since the newest finished, and the longest wait."""
        now = self.clock()
        # Units that were done when the work began (a resumed run) took no time of this attempt.
        started, before = self.first.setdefault(units, (now, done))
        at, finished, longest = self.newest.get(units, (started, before, 0.0))
        if done > finished:
            at, finished, longest = self.newest[units] = now, done, max(longest, now - at)
        each = (at - started) / (finished - before) if finished > before and at - started >= self.min_s else 0.0
        return each, now - at, longest


class Bars:
    """Draws a bar on the terminal for everything that is counted; below, what each work does and what it measured."""

    def __init__(self, views: Views | None = None) -> None:
        from rich.console import Console as Terminal, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.text import Text

        # Without markup: `[...]` in what a stage counts would be read as a style.
        description = TextColumn("{task.description}", markup=False)
        self._counted = Progress(description, BarColumn(), TextColumn("{task.fields[pace]}"), TimeElapsedColumn())
        # Beside the bars, so that a long remark takes none of their width.
        self._activities, self._figures = Progress(description, TimeElapsedColumn()), dict[str, str]()
        self._views = views = views or Views()
        self.live = Live(
            get_renderable=lambda: Group(
                self._counted,
                self._activities,
                *map(Text, list(self._figures.values())),
                *(Text(escape_control_characters(text)) for text in list(views.texts.values())),
            ),
            console=Terminal(stderr=True),
            transient=True,
        )
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def listener(self, title: str, folder: FindFolder = lambda: None) -> Listener:
        """Return a function that draws one bar for each thing the work counts, and a pulse for remarks."""
        self._views.folders[title] = folder
        pace = Pace(min_s=1.0)

        def listen(activity: str, done: int, total: int) -> None:
            description = escape_control_characters(f"{title}: {activity}")
            if isinstance(activity, Notice):
                say(f"{title}: {activity}")  # stays above the bars
            if isinstance(activity, Figures):
                self._figures[title] = description
            elif total:
                self._end_activity(title)
                pace_left = f"{pace.rate(activity, done)}{pace.left(activity, done, total)}"
                if (title, activity) not in self._tasks:
                    self._tasks[title, activity] = self._counted.add_task(description, total=total, pace="")
                counts = ", ".join(filter(None, (f"{done}/{total}", pace_left)))
                self._counted.update(self._tasks[title, activity], completed=done, total=total, pace=counts)
            elif isinstance(activity, Detailed) and (title, "") in self._tasks:
                self._activities.update(self._tasks[title, ""], description=description)
            else:
                self._end_activity(title)
                if activity:  # else an activity has ended, and no other has begun
                    self._tasks[title, ""] = self._activities.add_task(description, total=None)

        listen(BEFORE, 0, 0)
        return listen

    def ended(self, title: str) -> None:
        """Remove the bars of this work."""
        self._views.remove(title)
        self._end_activity(title)
        self._figures.pop(title, None)
        for key in [key for key in self._tasks if key[0] == title]:
            self._counted.remove_task(self._tasks.pop(key))

    def _end_activity(self, title: str) -> None:
        if (title, "") in self._tasks:
            self._activities.remove_task(self._tasks.pop((title, "")))
