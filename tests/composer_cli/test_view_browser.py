"""`composer view` in a real headless Chromium: pages of 100,000 rollouts, keys, phone, dark, live, hostile text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import needs
from support.browser import Tab, browsing
from support.runs import written
from support.view_site import (
    EVALUATION,
    HOSTILE,
    HOSTILE_RUN,
    RUNNING,
    Site,
    multiplied,
    rollout_path,
    runs,
    serving_view,
)

from composer_cli.view import page

pytestmark = [pytest.mark.slow, needs("chromium")]


@pytest.fixture(scope="module")
def artifacts(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs(tmp_path_factory.mktemp("view") / "artifacts", made)


@pytest.fixture(scope="module")
def large(artifacts: Path) -> str:
    """The name of a run with 100,000 rollouts."""
    return f"collect/{multiplied((artifacts / 'collect' / 'latest').resolve(), artifacts, 100_000).name}"


@pytest.fixture(scope="module")
def site(artifacts: Path, large: str) -> Iterator[Site]:
    with serving_view(artifacts) as running:
        yield running


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with browsing(tmp_path) as tab:
        tab.look()
        yield tab
        assert tab.errors == []


def test_a_page_of_100_000_rollouts_lists_one_screen(site: Site, tab: Tab, large: str) -> None:
    """What a page costs follows from what it holds."""
    last = rollout_path(large, "kata-train-0-00000#0@0-24999")
    for path in ("", f"run/{large}", f"run/{large}?text=copy-24999", f"run/{large}?offset=99950", last):
        tab.open(site.url + path)
        assert tab.value("document.getElementsByTagName('*').length") < 2000
        assert "Not here" not in tab.value("document.title")


def test_a_text_is_found_within_a_rollout_also_where_it_is_folded(site: Site, tab: Tab, artifacts: Path) -> None:
    name = f"collect/{(artifacts / 'collect' / 'latest').resolve().name}"
    tab.open(site.url + rollout_path(name, "kata-train-0-00000#0@0"))
    last = "[...document.querySelectorAll('details:not([open]) pre')].at(-1)?.textContent.trim()"
    folded = tab.value(f"{last}.split('\\n').at(-1).slice(-12)")
    opened = tab.value("document.querySelectorAll('details[open] pre').length")
    assert folded
    tab.press("/")
    assert tab.value("document.activeElement.id") == "find"
    for key in folded.upper():
        tab.press(key)
    found = int(tab.value("document.querySelector('.find output').textContent.split(' ')[0]"))
    assert found >= 1 and tab.value("CSS.highlights.get('found').size") == found
    for _ in range(found):
        tab.press("Enter")
    assert tab.value("document.querySelector('.find output').textContent") == f"{found} of {found}"
    assert tab.value("[...CSS.highlights.get('here')][0].toString().toLowerCase()") == folded.lower()
    assert tab.value("document.querySelectorAll('details[open] pre').length") > opened, "what holds the hit was opened"
    tab.value("(() => { find.value = 'no such words'; find.dispatchEvent(new Event('input')); })()")
    assert tab.value("document.querySelector('.find output').textContent") == "0 found"


def test_all_actions_have_keyboard_shortcuts(site: Site, tab: Tab, large: str) -> None:
    tab.open(f"{site.url}run/{large}")
    tab.press("/")
    assert tab.value("document.activeElement.name") == "text"
    for key in "copy-7":
        tab.press(key)
    tab.press("Enter")
    tab.until("location.search.includes('text=copy-7') && document.readyState === 'complete'")
    tab.press("n")
    tab.until("location.search.includes('offset=50') && document.readyState === 'complete'")
    tab.press("p")
    tab.until("!location.search.includes('offset=50') && document.readyState === 'complete'")
    tab.press("j")
    tab.press("j")
    tab.press("k")
    assert tab.value("document.querySelectorAll('tr.at').length") == 1
    wanted = tab.value("document.querySelector('tr.at td a').title")
    assert tab.value("document.activeElement.title") == wanted
    tab.press("o")
    tab.until("location.pathname.includes('/rollout/') && document.readyState === 'complete'")
    assert tab.value("document.querySelector('h1').textContent").startswith(wanted)
    tab.press("j")
    tab.until("document.querySelector('section.step').classList.contains('at')")
    # The neighbours are those of the list, and so is the way back.
    for key, number in (("n", "2"), ("p", "1")):
        tab.press(key)
        tab.until(f"document.querySelector('nav.pages')?.textContent.includes('{number} of')")
        tab.until("document.readyState === 'complete'")
    tab.press("u")
    tab.until("location.pathname.includes('/run/') && location.search.includes('text=copy-7')")


@pytest.mark.parametrize(
    "path",
    [
        *("", "LARGE", f"run/{RUNNING}", f"run/{EVALUATION}", f"compare/{EVALUATION}?task=t-1", "PAIRS", "curves"),
        *("ROLLOUT", "HOSTILE"),
    ],
)
def test_a_phone_is_wide_enough_and_the_dark_is_dark(
    site: Site, tab: Tab, artifacts: Path, large: str, path: str
) -> None:
    names = {
        "LARGE": f"run/{large}",
        "ROLLOUT": rollout_path(large, "kata-train-0-00000#0@0-7"),
        "HOSTILE": rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", "")),
        "PAIRS": f"run/extract-pairs/{(artifacts / 'extract-pairs' / 'latest').resolve().name}",
    }
    for dark in (False, True):
        tab.look(width=390, height=844, dark=dark)
        tab.open(site.url + names.get(path, path))
        assert tab.value("document.documentElement.scrollWidth") <= 390
        ground, ink = (
            sum(map(int, re.findall(r"\d+", tab.value(f"getComputedStyle(document.body).{name}"))[:3]))
            for name in ("backgroundColor", "color")
        )
        assert (ground < 150 and ink > 600) if dark else (ground > 700 and ink < 150)


def test_the_outcome_stays_in_sight_on_a_phone(site: Site, tab: Tab, large: str) -> None:
    tab.look(width=390, height=844)
    for path, cell in ((f"run/{large}", "table.rollouts td"), ("", "table.list td:nth-child(3)")):
        tab.open(site.url + path)
        tab.value("document.querySelector('.scroll').scrollLeft = 1000")
        left, right = tab.value(f"(r => [r.left, r.right])(document.querySelector('{cell}').getBoundingClientRect())")
        assert left >= 0 and right <= 390


def test_a_note_is_written_on_the_page_and_another_site_cannot_write_one(
    site: Site, tab: Tab, artifacts: Path, large: str
) -> None:
    tab.open(site.url + rollout_path(large, "kata-train-0-00000#0@0-7"))
    tab.value("document.querySelector('.note summary').click()")
    tab.value("document.querySelector('textarea').value = 'read <b>this</b>'")
    tab.value("document.querySelector('input[name=tags]').value = 'odd, late'")
    tab.value("document.querySelector('.note form').requestSubmit()")
    tab.until("location.hash === '#note' && document.readyState === 'complete'")
    assert tab.value("document.querySelector('textarea').value") == "read <b>this</b>"
    assert tab.value("[...document.querySelectorAll('.note .tag')].map(e => e.textContent).join()") == "odd,late"
    (file,) = (artifacts / "notes").rglob("*.json")
    # A page of another origin that even knows the token: its form is sent, and refused.
    form = f"<form method=post action='{site.url}note/{large}'><input name=id value='kata-train-0-00000#0@0-8'>"
    (artifacts / "evil.html").write_text(
        f"{form}<input name=text value=x></form><script>document.forms[0].submit()</script>"
    )
    tab.open((artifacts / "evil.html").as_uri())
    tab.until("location.protocol === 'http:' && document.body.textContent.includes('this server alone')")
    assert [file] == list((artifacts / "notes").rglob("*.json"))
    tab.errors.clear()  # the browser reports the refusal


def test_a_training_under_way_is_drawn_anew_without_being_asked(site: Site, tab: Tab, artifacts: Path) -> None:
    tab.open(f"{site.url}run/{RUNNING}")
    before = tab.value("document.querySelector('#live figcaption b').textContent")
    with (artifacts / RUNNING / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "reward": 0.87}) + "\n")
    tab.until("document.querySelector('#live figcaption b').textContent === '0.87'")
    assert before != "0.87"


def test_a_curve_tells_its_values_and_is_smoothed(site: Site, tab: Tab) -> None:
    tab.open(f"{site.url}run/{RUNNING}")
    point = """(x => { const svg = document.querySelector('svg.curve'), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent('pointermove',
            { bubbles: true, clientX: box.left + x * box.width, clientY: box.top + 9 }));
        return svg.parentElement.querySelector('.readout').innerText.split(/\\s+/).join(' ').trim() })"""
    assert re.fullmatch(r"step 1 0\.1", tab.value(f"{point}(0)")) and tab.value(
        "document.querySelector('path.at') !== null"
    )
    drawn = "document.querySelector('svg.curve path[data-points]').getAttribute('d')"
    before = tab.value(drawn)
    slide = "(s => { s.value = 0.5; s.dispatchEvent(new Event('input', { bubbles: true })) })"
    tab.value(f"{slide}(document.querySelector('.smooth input'))")
    # The means of 0.1 and 0.2 with the weights 1/2 and 1, and so on.
    assert tab.value(f"{point}(0.3)").startswith("step 2 0.2 (smoothed 0.1667)") and tab.value(drawn) != before
    tab.value(
        "document.dispatchEvent(new PointerEvent('pointermove')), document.body.dispatchEvent("
        "new PointerEvent('pointermove', { bubbles: true }))"
    )
    assert tab.value("document.querySelector('.readout').hidden && !document.querySelector('path.at')")
    tab.value("refresh()")
    assert tab.value(drawn) != before, "smoothed after the page was shown anew"


def test_a_hostile_transcript_does_nothing(site: Site, tab: Tab, artifacts: Path) -> None:
    saved = page.save(artifacts, page.chain(artifacts, [HOSTILE_RUN])).as_uri()
    rollout = rollout_path(HOSTILE_RUN, HOSTILE.replace("\x00", ""))
    for address in (saved, *(site.url + path for path in ("", f"run/{HOSTILE_RUN}", f"chain/{HOSTILE_RUN}", rollout))):
        tab.open(address)
        assert tab.value("document.title") != "owned"
        assert tab.value("document.querySelectorAll('main img, main script, main iframe').length") == 0
    assert "{{ 7 * 7 }}" in tab.value("document.body.innerText")


def test_the_policy_of_a_saved_report_holds_where_escaping_would_fail(tab: Tab, tmp_path: Path) -> None:
    folder = written(tmp_path, "train/20260102T030405Z-kata-A", config={"arm": "A", "seed": 0})
    path = page.save(tmp_path, page.chain(tmp_path, [str(folder)]))
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    path.write_text(path.read_text().replace("</main>", f"{evil}</main>"))
    tab.open(path.as_uri())
    assert tab.value("document.title") != "owned"
    tab.errors.clear()  # the browser reports what it refused


@pytest.mark.parametrize("width", [1280, 390])
def test_drawings_of_a_report_do_not_overlap(tab: Tab, tmp_path: Path, width: int) -> None:
    steps = [{"step": n, "reward": n / 9, "loss": 1 / (n + 1), "kl": n / 5, "entropy": 2.0} for n in range(9)]
    for number, arm in enumerate("ABC"):
        folder = written(
            tmp_path,
            f"train/20260102T03040{number}Z-kata-{arm}",
            config={"arm": arm, "seed": 0, "weights": {"grpo": 1.0}},
        )
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    path = page.save(tmp_path, page.chain(tmp_path, ["kata-A", "kata-B", "kata-C"]))
    tab.look(width=width, height=900)
    tab.open(path.as_uri())
    boxes = (
        "[...document.querySelectorAll('.curves svg.curve, .curves figcaption')].map(e => e.getBoundingClientRect())"
    )
    places = tab.value(f"JSON.stringify({boxes}.map(r => [r.left, r.top, r.right, r.bottom]))")
    drawn = json.loads(places)
    assert len(drawn) == 8
    for index, (left, top, right, bottom) in enumerate(drawn):
        assert right <= width
        for other in drawn[index + 1 :]:
            assert left >= other[2] - 1 or other[0] >= right - 1 or top >= other[3] - 1 or other[1] >= bottom - 1
