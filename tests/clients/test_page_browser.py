"""The live page in a real browser, over a scripted fleet."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from homing.wire import FleetState
from tests.support.browser import browser, find_browser
from tests.support.demo_fleet import DemoFleet, demo_app, serving

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium or Chrome is installed (Debian: apt install chromium)",
)

ASK = """(text => {
    document.querySelector('#prompt').value = text;
    document.querySelector('#composer').requestSubmit();
})"""
ANSWERED = "document.querySelector('#stop').hidden && document.querySelectorAll('.message').length"


async def test_the_page_shows_the_fleet_and_chats(tmp_path):
    """One browser for all of it: starting one takes seconds."""
    fleet = DemoFleet()
    fleet.recent = [
        {
            "age_s": 1.5,
            "num_blocks": 63,
            "rank": 1,
            "scores": [
                {"rank": 0, "matched_blocks": 3, "load": 4, "score": -0.31},
                {"rank": 1, "matched_blocks": 50, "load": 3, "score": 0.79},
            ],
        }
    ]
    last_word = asyncio.Event()
    app = demo_app(fleet, words=["Hello", ", <b>", "world"], until=last_word)
    async with serving(app) as url, browser(tmp_path) as page:
        await page.open(url)
        await page.look(width=1440, height=900)
        await sees_the_fleet(page)
        await sees_rates(page)
        await chats(page, last_word)
        await can_stop(page, last_word)
        await fits(page)
        await notices_changes(page, fleet)
        await asks_for_a_key(page, fleet)
        assert all(urlsplit(address).netloc in urlsplit(url).netloc for address in page.requests)
        refusals = ("status of 503", "status of 401")
        assert all(any(each in problem for each in refusals) for problem in page.problems)


async def sees_the_fleet(page):
    await page.until("document.querySelectorAll('#ranks li').length === 3")
    assert await page.text("#model") == "SmolLM2-135M-Instruct"
    assert await page.text("#status") == "running · 2 of 3 ranks"
    assert "routed by prefix affinity" in await page.text("#summary")
    assert "Rank 0" in await page.text("#ranks li")
    assert "gone" in await page.text("#ranks li:last-child")
    assert (await page.text("#routes tbody")).split("\n")[0].split() == [
        "1.5",
        "s",
        "63",
        "rank",
        "1",
    ]
    assert await page.text("#routes .chosen") == "1: 0.79 50 held, load 3"


async def sees_rates(page):
    """After some polls there are curves, and what they show is also said in words."""
    await page.until(
        "document.querySelector('#speed .curve') && document.querySelector('#hits .curve')"
    )
    assert float(await page.text("#speed output")) > 0
    label = await page.run("document.querySelector('#hits svg').getAttribute('aria-label')")
    assert label.startswith("Prompt tokens found in a cache: ")


async def chats(page, last_word):
    """Text appears before the answer ends, as text and not as markup; then the figures do."""
    await page.run(f"{ASK}('Hi')")
    await page.until("document.querySelector('.words')?.textContent === 'Hello, <b>'")
    assert await page.run("document.querySelector('#send').hidden") is True
    last_word.set()
    await page.until(ANSWERED)
    assert await page.text(".words") == "Hello, <b>world"
    assert "first after" in await page.text(".facts")
    assert "0 of 8 prompt tokens cached" in await page.text(".facts")
    await page.run(f"{ASK}('And now?')")
    await page.until(f"{ANSWERED} === 4")
    # The second turn carries the first, and 16 of its 24 tokens were seen before.
    assert "16 of 24 prompt tokens cached" in await page.text(".message:last-child .facts")


async def can_stop(page, last_word):
    last_word.clear()
    await page.run(f"{ASK}('Stop me')")
    await page.until(
        "document.querySelector('.message:last-child .words').textContent === 'Hello, <b>'"
    )
    await page.run("document.querySelector('#stop').click()")
    await page.until(f"{ANSWERED} === 6")
    assert (await page.text(".message:last-child .facts")).endswith("stopped")
    await page.run("document.querySelector('#clear').click()")
    assert await page.run("document.querySelectorAll('.message').length") == 0


async def fits(page):
    """Nothing is wider than the screen, on a phone and on a desk; the dark is dark."""
    for width, height in ((360, 740), (820, 1180), (1440, 900)):
        for dark in (False, True):
            await page.look(width=width, height=height, dark=dark)
            await page.until(f"document.documentElement.scrollWidth <= {width}")
            background = await page.run("getComputedStyle(document.body).backgroundColor")
            brightness = sum(int(part) for part in background[4:-1].split(","))
            assert (brightness < 200) is dark


async def notices_changes(page, fleet):
    fleet.state = FleetState.PAUSED
    await page.until("document.querySelector('#status').innerText === 'paused · 2 of 3 ranks'")
    fleet.down = True
    await page.until("document.querySelector('#status').innerText.includes('does not answer')")
    fleet.down = False
    await page.until("document.querySelector('#status').innerText.startsWith('paused')")


async def asks_for_a_key(page, fleet):
    fleet.api_key = "secret"
    await page.until("document.querySelector('#key').open")
    await page.run(
        "document.querySelector('#key-value').value = 'secret';"
        "document.querySelector('#key form').requestSubmit()"
    )
    fleet.state = FleetState.RUNNING
    await page.until("document.querySelector('#status').innerText.startsWith('running')")
