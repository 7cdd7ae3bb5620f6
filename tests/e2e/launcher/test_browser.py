"""The live page in a browser, open while a job fails, resumes and is stopped; ``SCREENSHOTS`` keeps its pictures."""

import os
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.launcher.watched_jobs import WatchedAgent, ended, trains
from tests.support import chromium

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not chromium.PROGRAM, reason="there is no chromium on this machine"),
]


def pictures(page: chromium.Browser, folder: Path, name: str) -> None:
    for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
        page.look(width, 844, dark=dark, scale=2.0 if width < 500 else 1.0)
        page.until("document.fonts.status === 'loaded'")
        # A phone shows all without a scroll to the side; wide tables scroll by themselves.
        assert page.run("document.documentElement.scrollWidth") <= width
        page.picture(folder / f"{name}-{width}{'-dark' if dark else ''}.png")
    page.look(1280)


def contrasts(page: chromium.Browser) -> list[str]:
    """Texts whose colours differ by less than WCAG 2 asks of normal text: https://www.w3.org/TR/WCAG22/#contrast-minimum."""
    found: list[str] = page.run(
        """(() => {
      const part = (c) => { const v = c / 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
      const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
      const rgb = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
      const back = (node) => {
        for (let one = node; one; one = one.parentElement) {
          const colour = rgb(getComputedStyle(one).backgroundColor);
          if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
      };
      const bad = [];
      const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
      for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const node = text.parentElement;
        if (["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName)) continue;
        if (!text.data.trim() || !node.checkVisibility()) continue;
        if (node.namespaceURI.includes("svg")) continue;
        const [a, b] = [light(rgb(getComputedStyle(node).color)), light(back(node))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) bad.push(`${ratio.toFixed(2)} ${text.data.trim()}`);
      }
      return bad;
    })()"""
    )
    return found


def test_the_page_follows_a_job_that_fails_resumes_and_is_stopped_and_asks_its_agent_alone(
    tmp_path: Path, forked_launchers: None
) -> None:
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    agent = WatchedAgent(tmp_path, "a", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
    try:
        with chromium.browser(tmp_path) as page:
            _follow(page, agent, tmp_path, shots)
        assert not page.errors or all("ERR_CONNECTION_REFUSED" in error for error in page.errors), page.errors
    finally:
        agent.end()
    own = urlsplit(agent.address["url"]).netloc
    asked = {urlsplit(url) for url in page.requests}
    assert {url.netloc for url in asked if url.scheme != "data"} == {own}
    assert {url.path for url in asked if url.scheme != "data"} <= {"/", "/live", "/flush", "/stop"}
    assert not any(agent.address["token"] in url for url in page.requests)
    assert {address for address in chromium.connected(tmp_path) if not address.startswith("127.0.0.1:")} == set()


def _follow(page: chromium.Browser, agent: WatchedAgent, folder: Path, shots: Path) -> None:
    address = agent.address
    agent.until_status(trains, "the job trains")

    # --- without the token it can be read, and nothing more; without scripts it loads itself again
    page.look(1280)
    page.open(address["url"] + "/")
    page.until("document.querySelector('#state').textContent === 'trains'")
    assert page.run("document.querySelector('#buttons').hidden") is True
    for dark in (False, True):
        page.look(1280, dark=dark)
        assert contrasts(page) == []
    page.look(1280)

    # --- with it: the token leaves the address, and a flush is asked for and seen
    page.open("about:blank")
    page.open(f"{address['url']}/#token={address['token']}")
    page.until("!document.querySelector('#buttons').hidden")
    assert page.run("location.href") == address["url"] + "/"
    page.run("document.querySelector('#flush').focus(), document.querySelector('#flush').click()")
    said = page.until("document.querySelector('#said').textContent")
    assert "is being persisted" in said or "already" in said

    # --- it brings itself up to date, and leaves the focus, the scroll and what is marked as they are
    page.run("document.querySelector('#flush').focus(), scrollTo(0, 200)")
    top = page.run("scrollY")
    step = "Number(document.querySelectorAll('.figures b')[1].textContent.replace(',', ''))"
    before = page.until(step)
    page.until(f"{step} > {before}")
    assert page.run("document.activeElement.id") == "flush" and page.run("scrollY") == top
    pictures(page, shots, "trains")

    # --- a failure while it is open
    (folder / "kill").touch()
    page.until("document.querySelector('.events').textContent.includes('rank 1 died: SIGKILL')")
    agent.until_status(lambda now: trains(now, restarts=1), "the job has resumed")
    page.until("document.querySelector('#state').textContent === 'trains'")
    page.until("document.querySelector('[data-part=failures]').textContent.includes('SIGKILL')")
    page.until(f"{step} > {before}")
    pictures(page, shots, "resumed")

    # --- a stop, which asks twice; then the page says that nobody answers, and how old it is
    page.run("document.querySelector('#stop').click()")
    assert page.run("document.querySelector('#stop').textContent") == "Press again to stop the job"
    assert "stop" not in {urlsplit(url).path for url in page.requests}
    page.run("document.querySelector('#stop').click()")
    ended(agent.process)
    page.until("!document.querySelector('#lost').hidden")
    assert "does not answer" in page.run("document.querySelector('#lost').textContent")
    time.sleep(3)
    assert int(page.run("document.querySelector('#lost').textContent.match(/(\\d+) s old/)[1]")) >= 1
    pictures(page, shots, "ended")


def test_the_page_can_be_read_without_scripts(tmp_path: Path, forked_launchers: None) -> None:
    agent = WatchedAgent(tmp_path, "a", "--standalone", "--nproc-per-node=2")
    try:
        agent.until_status(trains, "the job trains")
        with chromium.browser(tmp_path) as page:
            page.without_scripts()
            page.open(agent.address["url"] + "/")
            agent.until(lambda: sum(url.endswith("/") for url in _asked(page)) > 1, "it loads itself again")
            assert {urlsplit(url).path for url in page.requests} == {"/"}
        agent.ask("/stop", token=agent.address["token"])
        ended(agent.process)
    finally:
        agent.end()


def _asked(page: chromium.Browser) -> list[str]:
    page.run("1")  # takes what the browser has reported meanwhile
    return page.requests
