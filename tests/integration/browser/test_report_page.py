"""The report in a real browser: looked at on a desk and on a phone, by day and by night, and clicked through."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import DESKTOP, PHONE, Browser

LOOKS = [(size, scheme) for size in (DESKTOP, PHONE) for scheme in ("light", "dark")]

# Of each plot: its title, its width and that of its box, and the visible marks of data in it.
PLOTS = """
return [...document.querySelectorAll('.plot')].map(box => {
  const svg = box.querySelector('svg');
  const marks = svg ? [...svg.querySelectorAll('[class*=mark-]:not(.role-axis-grid, .role-axis-tick, .role-axis-domain,'
    + '.role-axis-label, .role-axis-title, .role-legend-label, .role-legend-symbol) > path')] : [];
  return {
    title: box.getAttribute('aria-label'), text: box.textContent, box: box.clientWidth,
    width: svg ? svg.getBoundingClientRect().width : 0, height: svg ? svg.getBoundingClientRect().height : 0,
    marks: marks.filter(mark => { const r = mark.getBoundingClientRect(); return r.width + r.height > 1; }).length,
  };
});
"""
# Elements that stick out of the window, but for what lies in a box that scrolls.
STICKING_OUT = """
return [...document.querySelectorAll('body *')].filter(element => !element.closest('.scroll, #vg-tooltip-element')
  && !element.closest('svg') && element.getClientRects().length && element.getBoundingClientRect().right > innerWidth + 1)
  .map(element => element.outerHTML.slice(0, 100));
"""
COLOURS = """
const page = getComputedStyle(document.body).backgroundColor;
const told = ['p', 'h2', 'td', 'th', 'summary', 'a', 'dd'].map(name => getComputedStyle(document.querySelector(name)).color);
const drawn = [...document.querySelectorAll('.plot svg text')].map(text => getComputedStyle(text).fill);
const bars = [...document.querySelectorAll('.plot svg .mark-rect.role-mark path')].map(bar => getComputedStyle(bar).fill);
return [page, [...new Set([...told, ...drawn])], [...new Set(bars)]];
"""


def luminance(colour: str) -> float:
    """As WCAG defines it, of `rgb(r, g, b)`."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def check_colours(browser: Browser, scheme: str) -> None:
    page, texts, bars = browser.run(COLOURS)
    assert (luminance(page) < 0.1) == (scheme == "dark")
    assert len(texts) > 1 and min(contrast(page, text) for text in texts) >= 4.5, (page, texts)
    assert len(bars) > 1 and min(contrast(page, bar) for bar in bars) >= 3, (page, bars)


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_all_is_drawn_and_nothing_is_fetched(browser: Browser, report: Path, size: tuple[int, int], scheme: str):
    browser.look(size, scheme)
    browser.open(report)
    plots = browser.run(PLOTS)
    assert {plot["title"] for plot in plots} >= {
        "Acceptance length by prompt set", "Acceptance by position: held_out", "Acceptance length of the drafters", "Loss",
        "Conditional accuracy by draft step: wide", "Coverage by size, 32,000 chosen", "Lengths of the sequences",
        "Speed of the extraction", "Bytes of hidden states", "Time of CPUs and GPUs",
    }  # fmt: skip
    for plot in plots:
        assert plot["marks"] > 0 and "could not be drawn" not in plot["text"], plot
        assert 0.9 * plot["box"] - 10 < plot["width"] <= plot["box"] + 1 and plot["height"] > 50, plot
    check_colours(browser, scheme)
    for summary in browser.driver.find_elements("css selector", "summary"):
        browser.run("arguments[0].parentElement.open = true", summary)
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert browser.run(STICKING_OUT) == []
    assert browser.run("return window.broken") is None
    assert browser.complaints() == []
    assert set(browser.requests()) == {report.as_uri()}


def test_links_lead_to_their_sections(browser: Browser, report: Path):
    browser.look()
    browser.open(report)
    links = browser.driver.find_elements("css selector", "nav a")
    assert [link.text for link in links] == [
        "Acceptance", "Drafters", "Training", "Vocabulary", "Data", "Extraction", "Costs", "Configuration",
    ]  # fmt: skip
    place = "return location.hash ? document.querySelector(location.hash + ' h2').getBoundingClientRect().top : -1"
    for link in links:
        browser.run("scrollTo(0, 0)")
        link.click()
        browser.wait(f"{link.text} comes into view", lambda: -1 < browser.run(place) < DESKTOP[1] - 20)
        assert browser.run("return document.querySelector(location.hash + ' h2').textContent") == link.text


def test_tables_and_listings_open_and_close(browser: Browser, report: Path):
    browser.look()
    browser.open(report)
    plots = len(browser.driver.find_elements("css selector", ".plot"))
    summaries = browser.driver.find_elements("css selector", "summary")
    assert len(summaries) == plots + 2  # the numbers of each plot, all shards, and the configuration
    for summary in summaries:
        inside = summary.find_element("xpath", "following-sibling::*[1]")
        assert not inside.is_displayed()
        summary.click()
        assert inside.is_displayed() and inside.text.strip(), summary.text
        summary.click()
        assert not inside.is_displayed()
    shards = next(summary for summary in summaries if summary.text == "46 rows")  # 45 shards and their sum
    shards.click()
    assert len(shards.find_elements("xpath", "..//tbody/tr")) == 46


def test_pointing_at_a_bar_tells_its_numbers(browser: Browser, report: Path):
    from selenium.webdriver.common.action_chains import ActionChains

    browser.look()
    browser.open(report)
    box = browser.driver.find_element("css selector", ".plot[aria-label='Tokens by source']")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", box)
    bar = box.find_element("css selector", ".mark-rect.role-mark path")

    def tooltip() -> str:
        ActionChains(browser.driver).move_to_element(box).move_to_element(bar).perform()
        shown = browser.driver.find_elements("css selector", "#vg-tooltip-element.visible")
        return shown[0].text if shown else ""

    text = browser.wait("a tooltip", tooltip)
    assert "30,000" in text and "supervised" in text and "<script>window.broken = 1</script>" in text
    assert (
        browser.run("return document.querySelectorAll('#vg-tooltip-element script, #vg-tooltip-element img').length")
        == 0
    )
    assert browser.run("return window.broken") is None and browser.complaints() == []


def test_plots_follow_the_colour_scheme_of_an_open_page(browser: Browser, report: Path):
    browser.look(DESKTOP, "light")
    browser.open(report)
    check_colours(browser, "light")
    before = set(browser.run(COLOURS)[1])
    browser.look(DESKTOP, "dark")
    browser.wait("all plots are redrawn", lambda: not before & set(browser.run(COLOURS)[1]))
    check_colours(browser, "dark")
    assert browser.complaints() == []


def test_wide_tables_scroll_in_their_boxes_on_a_phone(browser: Browser, report: Path):
    browser.look(PHONE)
    browser.open(report)
    boxes = [box for box in browser.driver.find_elements("css selector", ".scroll") if box.is_displayed()]
    wide = [box for box in boxes if browser.run("return arguments[0].scrollWidth > arguments[0].clientWidth", box)]
    assert wide
    for box in wide:
        assert browser.run("arguments[0].scrollLeft = 1e6; return arguments[0].scrollLeft", box) > 0
        last = box.find_element("css selector", "thead th:last-child")
        assert browser.run("return arguments[0].getBoundingClientRect().right", last) <= PHONE[0]
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]


@pytest.mark.parametrize("added", ["<script>window.broken = 1</script>", "<img src='http://127.0.0.1:9/pixel.png'>"])
def test_the_policy_stops_what_does_not_belong_there(browser: Browser, report: Path, tmp_path: Path, added: str):
    changed = tmp_path / "changed.html"
    changed.write_text(report.read_text(encoding="utf-8").replace("</main>", f"{added}</main>"), encoding="utf-8")
    browser.look()
    browser.open(changed)
    assert "Content Security Policy" in " ".join(browser.wait("a complaint", browser.complaints))
    assert browser.run("return window.broken") is None


def test_a_plot_that_cannot_be_drawn_says_so(browser: Browser, report: Path, tmp_path: Path):
    changed = tmp_path / "changed.html"
    spec = re.compile(r'(?<=<script type="application/json">).*?(?=</script>)', re.DOTALL)
    changed.write_text(spec.sub('{"mark": 7}', report.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    browser.look()
    browser.open(changed)
    plots = browser.run(PLOTS)
    assert "could not be drawn" in plots[0]["text"] and plots[0]["marks"] == 0
    assert all(plot["marks"] for plot in plots[1:])
