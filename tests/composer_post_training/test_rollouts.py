"""One rollout shows itself as a conversation, in a terminal and in a notebook, whatever a model wrote."""

import re
from html.parser import HTMLParser
from pathlib import Path

import composer_post_training as composer
from composer_cli.show import rollout as shown_rollouts
from composer_cli.show import text
from composer_post_training.rollouts import OPEN_LINES, Rollout
from stages.runs import queries


def test_a_rollout_is_printed_as_the_command_line_prints_it(made: Path) -> None:
    run = composer.find("collect", made)
    for rollout in run.rollouts():
        assert str(rollout) == text.transcript_text(run.path, shown_rollouts.find(run, rollout.rollout_id), full=True)
        assert "    cat solution.py" in str(rollout) and "\n" not in repr(rollout)
        assert queries.outcome(rollout.row) == queries.rollout(run, rollout.rollout_id)[0]["outcome"]


def test_the_outcome_of_a_row_is_that_of_the_list(made: Path) -> None:
    run = composer.find("collect", made)
    rows = [
        run.rollouts()[0].row | {"reward": reward, "hacked": hacked, "error_type": error}
        for reward, hacked, error in (
            (1.0, None, None),
            (0.5, True, None),
            (None, None, None),
            (None, False, "TimeoutError"),
            (1.0, True, "TimeoutError"),
        )
    ]
    found = [queries.outcome(row) for row in rows]
    assert found == ["passed", "failed, hacked", "not graded", "error", "passed, hacked, error"]
    question = f"SELECT {queries.OUTCOME.format('reward')} FROM (SELECT unnest(?, recursive := true))"
    columns = ("reward", "hacked", "error_type")
    with queries.duckdb.connect() as connection:
        asked = connection.execute(question, [[{name: row[name] for name in columns} for row in rows]]).fetchall()
    assert [words for (words,) in asked] == found


class Tags(HTMLParser):
    """Collects the tags and attributes of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = list[str](), list[tuple[str, str | None]](), ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_notebook_gets_the_conversation_and_nothing_that_a_model_wrote_as_markup(made: Path) -> None:
    first = composer.find("collect", made).rollouts()[0]
    hostile = "<script>alert(1)</script></pre><img src=x onerror=alert(2)>\u202e\x1b[2J"
    steps = [{**first.steps[0], "action": hostile, "observation": hostile + "\nline" * OPEN_LINES}]
    row = {**first.row, "task_id": hostile, "error_type": hostile, "error": hostile, "metrics_json": '{"<b>x": 1.0}'}
    page = Rollout(hostile, {}, first.messages, steps, row, first.folder)._repr_html_()
    found = Tags()
    found.feed(page)
    assert set(found.tags) == {"div", "p", "b", "table", "tr", "td", "pre", "details", "summary"}
    assert {name for name, _ in found.attributes} == {"style"} and "url(" not in page
    assert found.text.count("<script>alert(1)</script>") >= 4 and "\u202e" not in page and "\x1b" not in page
    assert re.search(rf"<summary><b>observation, step 1[^<]*</b>, {OPEN_LINES + 1} lines</summary><pre", page)  # folded
    assert re.search(r"assistant, step 1</b><pre", page) and "grading" in found.text and "ended by" in found.text


def test_an_evaluated_rollout_without_steps_is_a_conversation_too(made: Path) -> None:
    first = composer.find("collect", made).rollouts()[0]
    row = {**first.row, "reward": None, "transcript_json": '[{"role": "user", "content": "1 + 1?"}]'}
    shown = Rollout("one", {}, [], [], row, first.folder)
    assert "1 + 1?" in str(shown) and "1 + 1?" in shown._repr_html_() and "not graded" in str(shown)
