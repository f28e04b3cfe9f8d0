"""The page at `/` in headless Chromium: the chat streams, and the picture of the pool is the pool."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving_cases import serving, slow, wait_until
from tiny_engine import tiny_llm
from web_browser import MISSING, browser

from pagedjax.llm import LLM
from pagedjax.serving.app import Limits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    # Of selenium's own, when a browser quits.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Page:
    """The page, in the words of its tests."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *args)

    def text(self, name: str) -> str:
        return self.js(f"document.getElementById('{name}').innerText")

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def set(self, name: str, value: object) -> None:
        self.js(f"document.getElementById('{name}').value = arguments[0]", str(value))

    def send(self, prompt: str = "Hi", **options: Any) -> None:
        for name, value in {"max-tokens": 30, "seed": 1, "temperature": 0, **options}.items():
            self.set(name, value)
        self.set("prompt", prompt)
        self.click("#composer button.main")

    def answers(self, card: int = 0) -> list[str]:
        script = (
            "[...document.querySelectorAll('.card')[arguments[0]]?.querySelectorAll('.text span:last-child') ?? []]"
        )
        return self.js(f"{script}.map((text) => text.textContent)", card)

    def states(self) -> list[str]:
        return self.js("[...document.querySelectorAll('.state')].map((state) => state.textContent)")

    def stat(self, name: str) -> str:
        script = (
            "[...document.querySelectorAll('#stats div')].find((tile) => tile.children[0].textContent == arguments[0])"
        )
        return self.js(f"{script}?.children[1].textContent", name)

    def num_blocks(self, kind: str) -> int:
        return self.js(f"document.querySelectorAll('#grid .{kind}').length")

    def wait(self, condition: Callable[[], Any]) -> None:
        wait_until(condition, timeout_s=60)


@contextmanager
def page_of(llm: LLM, size: tuple[int, int] = (1280, 900), **options: Any) -> Iterator[Page]:
    """A server's page, which may not have said anything on the console."""
    with serving(llm, **options) as server, browser(size) as driver:
        page = Page(driver, server.url)
        page.wait(lambda: page.num_blocks("block") > 0 or options.get("limits") is not None)
        yield page
        said = [entry["message"] for entry in driver.get_log("browser")]
        assert [message for message in said if " 401 " not in message and " 400 " not in message] == []


def test_the_chat_streams_and_the_map_shows_it():
    with page_of(slow(tiny_llm(), 0.05)) as page:
        assert "tiny" in page.text("model")
        assert page.text("link") == "live"
        assert page.num_blocks("block") == 64
        assert page.stat("blocks in use") == "0 / 64"
        page.send("Hello")
        lengths: set[int] = set()

        def is_done() -> bool:
            lengths.update(len(answer) for answer in page.answers())
            return page.states() == ["done"]

        page.wait(lambda: page.num_blocks("used") > 2)
        page.wait(is_done)
        assert len(lengths) > 5  # it grew before their eyes
        page.wait(lambda: page.stat("blocks in use") == "0 / 64")
        page.wait(lambda: page.num_blocks("used") == 0)
        assert page.num_blocks("cached") > 0
        assert page.num_blocks("lit") == 0
        assert "Ended: request 1" in page.text("log")
        # The second message has the first exchange before it.
        page.send("Go on", **{"max-tokens": 5})
        page.wait(lambda: page.states() == ["done", "done"])
        assert page.stat("prefix hits") not in ("-", "0.0 %")
        page.click("#new-chat")
        assert page.states() == []


def test_several_answers_share_blocks_and_copy_when_they_write():
    with page_of(slow(tiny_llm(), 0.05)) as page:
        page.send("Hello", n=3, temperature=30)
        page.wait(lambda: page.num_blocks("shared") > 0)
        assert "3" in page.js("[...document.querySelectorAll('#grid .shared')].map((cell) => cell.textContent)")
        page.wait(lambda: int(page.stat("copies")) >= 2)
        page.wait(lambda: len(page.answers()) == 3)
        assert "Copy-on-write: block" in page.text("log")
        assert page.js("getComputedStyle(document.querySelector('.card .fork')).display") == "none"
        page.wait(lambda: page.states() == ["done"])
        assert len(set(page.answers())) == 3


def test_a_fork_goes_on_from_where_its_parent_is():
    with page_of(slow(tiny_llm(), 0.1)) as page:
        page.send("Hello", temperature=30, **{"max-tokens": 40})
        page.wait(lambda: page.answers() and len(page.answers()[0]) > 5)
        page.click(".card .fork")
        page.wait(lambda: len(page.states()) == 2 and page.answers(0) and page.answers(0)[0])
        page.wait(lambda: page.num_blocks("shared") > 0)
        page.wait(lambda: page.states() == ["done", "done"])
        fork, parent = page.answers(0)[0], page.answers(1)[0]
        common = next((i for i, (a, b) in enumerate(zip(fork, parent, strict=False)) if a != b), len(fork))
        assert 5 < common < len(parent)


def test_preemptions_are_seen():
    with page_of(slow(tiny_llm(num_blocks=24, enable_prefix_caching=False), 0.1)) as page:
        page.send("Hello there", n=1, **{"max-tokens": 44})
        page.send("Something else", n=1, **{"max-tokens": 44})
        page.wait(lambda: page.stat("preemptions") == "1" and "Preempted: request" in page.text("log"))
        page.wait(lambda: any(state.startswith("preempted") for state in page.states()))
        page.wait(lambda: page.states() == ["done", "done"])


def test_stopping_frees_the_blocks_at_once():
    with page_of(slow(tiny_llm(), 0.1)) as page:
        for prompt in ("One", "Two", "Three"):
            page.send(prompt)
        page.wait(lambda: len([state for state in page.states() if "running" in state]) >= 2)
        page.click(".card .stop")
        page.wait(lambda: "stopped" in page.states())
        page.click("#stop-all")
        page.wait(lambda: page.states() == ["stopped"] * 3)
        page.wait(lambda: page.stat("blocks in use") == "0 / 64")


def test_answers_and_prompts_are_text():
    """Nothing that a model or a user says becomes part of the page."""
    with page_of(slow(tiny_llm(), 0.05)) as page:
        page.send("<img src=x onerror=alert(1)>", n=2)
        page.wait(lambda: page.states() == ["done"])
        assert page.js("document.querySelectorAll('.card img, .card b, .card script').length") == 0
        assert page.js("document.querySelector('.question').textContent") == "<img src=x onerror=alert(1)>"


def test_errors_are_shown_on_their_card():
    with page_of(tiny_llm()) as page:
        page.send("Hello", **{"max-tokens": 5000})
        page.wait(lambda: page.states() and "max_completion_tokens" in page.states()[0])
        assert page.js("document.querySelector('.state').classList.contains('failed')")


def test_a_key_is_asked_for():
    with page_of(tiny_llm(), limits=Limits(api_key="secret", max_calls=64)) as page:
        page.wait(lambda: not page.js("document.getElementById('key-form').hidden"))
        assert page.num_blocks("block") == 0
        page.set("key", "secret")
        page.click("#key-form button")
        page.wait(lambda: page.num_blocks("block") == 64)
        page.send("Hello")
        page.wait(lambda: page.states() == ["done"])
        assert page.js("document.getElementById('key-form').hidden")


def test_keyboard_and_screen_readers():
    from selenium.webdriver.common.keys import Keys

    with page_of(slow(tiny_llm(), 0.1)) as page:
        body = page.driver.find_element("tag name", "body")
        page.js("document.getElementById('lesson').open = false")
        seen = []
        for _ in range(14):
            page.driver.switch_to.active_element.send_keys(Keys.TAB)
            seen.append(page.js("document.activeElement.id || document.activeElement.textContent.trim()"))
        for name in ("Skip to the KV pool", "prompt", "Options", "Send", "new-chat", "several", "samples", "grid"):
            assert name in seen, (name, seen)
        page.set("prompt", "Hello")
        page.set("max-tokens", 40)
        page.driver.find_element("id", "prompt").send_keys(Keys.ENTER)
        page.wait(lambda: page.num_blocks("used") > 0)
        grid = page.driver.find_element("id", "grid")
        grid.send_keys(Keys.ARROW_RIGHT)
        page.wait(
            lambda: re.match(r"Block 1: \d of 4 slots hold tokens, from position 0 on. Held by", page.text("detail"))
        )
        assert page.js("document.getElementById('grid').getAttribute('aria-activedescendant')") == "block-1"
        grid.send_keys(Keys.END)
        assert page.text("detail") == "Block 64: Free."
        grid.send_keys(Keys.ARROW_UP)
        assert page.text("detail").startswith("Block ")
        assert page.text("detail") != "Block 64: Free."
        assert "blocks of 4 tokens are in use" in page.text("summary")
        unlabelled = (
            "[...document.querySelectorAll('input, textarea, button, [role=listbox]')].filter((each) =>"
            " !each.labels?.length && !each.textContent.trim() && !each.ariaLabel).length"
        )
        assert page.js(unlabelled) == 0
        assert page.js("document.documentElement.lang") == "en"
        assert body.is_displayed()
        page.click("#stop-all")


def test_a_card_lights_its_blocks_up_in_order():
    with page_of(slow(tiny_llm(), 0.1)) as page:
        page.send("Hello")
        page.wait(lambda: page.num_blocks("used") > 4)
        page.js("document.querySelector('.card').focus()")
        page.wait(lambda: "Block table of request 1: 1, 2, 3" in page.text("detail"))
        lit = "[...document.querySelectorAll('#grid .lit')].map((cell) => cell.textContent)"
        assert page.js(lit)[:4] == ["1", "2", "3", "4"]
        page.wait(lambda: page.states() == ["done"])
        page.wait(lambda: page.num_blocks("lit") == 0)


def test_a_phone():
    """Nothing is wider than the screen, and a thumb hits what it is meant for."""
    with page_of(slow(tiny_llm(), 0.05), size=(360, 740)) as page:
        page.send("Hello" * 5, n=2)
        page.wait(lambda: len(page.answers()) == 2)
        assert page.js("document.documentElement.scrollWidth") <= 360
        heights = "[...document.querySelectorAll('button, summary')].map((each) => each.offsetHeight)"
        assert all(height == 0 or height >= 44 for height in page.js(heights))
        page.wait(lambda: page.states() == ["done"])
