"""The live page in a browser, open while a job fails, resumes and is stopped."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.watch.conftest import WatchedAgent, trains
from tests.support import chromium

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(not chromium.PROGRAM, reason="there is no chromium on this machine"),
]


def test_the_page_follows_a_job_that_fails_resumes_and_is_stopped_and_asks_its_agent_alone(
    watch, tmp_path: Path
) -> None:
    agent = watch("a", "--standalone", "--nproc-per-node=2")
    with chromium.browser(tmp_path) as page:
        _follow(page, agent, tmp_path)
    assert all("ERR_CONNECTION_REFUSED" in error for error in page.errors), page.errors
    own = urlsplit(agent.address["url"]).netloc
    asked = {urlsplit(url) for url in page.requests}
    assert {url.netloc for url in asked if url.scheme != "data"} == {own}
    assert {url.path for url in asked if url.scheme != "data"} <= {"/", "/live", "/flush", "/stop"}
    assert not any(agent.address["token"] in url for url in page.requests)
    assert {address for address in chromium.connected(tmp_path) if not address.startswith("127.0.0.1:")} == set()


def _follow(page: chromium.Browser, agent: WatchedAgent, folder: Path) -> None:
    address = agent.address
    agent.until_status(trains, "the job trains")

    # --- without the token it can be read, and nothing more
    page.look(390)
    page.open(address["url"] + "/")
    page.until("document.querySelector('#state').textContent === 'trains'")
    assert page.run("document.querySelector('#buttons').hidden") is True
    assert page.run("document.documentElement.scrollWidth") <= 390, "a phone shows all without a scroll to the side"
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

    # --- a failure while it is open
    (folder / "kill").touch()
    page.until("document.querySelector('.events').textContent.includes('rank 1 died: SIGKILL')")
    agent.until_status(lambda now: trains(now, restarts=1), "the job has resumed")
    page.until("document.querySelector('#state').textContent === 'trains'")
    page.until(f"{step} > {before}")

    # --- a stop, which asks twice; then the page says that nobody answers, and how old it is
    page.run("document.querySelector('#stop').click()")
    assert page.run("document.querySelector('#stop').textContent") == "Press again to stop the job"
    assert "stop" not in {urlsplit(url).path for url in page.requests}
    page.run("document.querySelector('#stop').click()")
    agent.ends()
    page.until("!document.querySelector('#lost').hidden")
    assert "does not answer" in page.run("document.querySelector('#lost').textContent")
    page.until("document.querySelector('#lost').textContent.match(/(\\d+) s old/)[1] >= 1")
