"""The page in a real browser: a key-protected server, a conversation, a stop, the engine watched, hostile text."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qserve.runtime.detokenizer import ByteDetokenizer
from qserve.runtime.engine import Engine
from qserve.runtime.server.config import ServerConfig
from qserve.runtime.server.serve import ServerHandle

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
support = pytest.importorskip("selenium.webdriver.support.ui")
exceptions = pytest.importorskip("selenium.common.exceptions")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="Chromium or its driver is not installed"),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1200,900"
)
KEY = "open-sesame"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield browser
    browser.quit()


class Page:
    """The page, as somebody sees it who looks for elements by their id."""

    def __init__(self, driver: Any, server: ServerHandle) -> None:
        self.driver = driver
        self.server = server
        driver.get(server.url.removesuffix("/v1") + "/")

    def __getitem__(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def wait(self, condition: Callable[[], Any]) -> Any:
        try:
            return support.WebDriverWait(self.driver, 60, 0.05).until(lambda _: condition())
        except exceptions.TimeoutException:
            shown = self.driver.find_element("tag name", "body").text
            raise AssertionError(f"still not so after a minute; the page shows:\n{shown}") from None

    def enter_key(self, key: str = KEY) -> None:
        self.wait(self["key-dialog"].is_displayed)
        self["key"].send_keys(key)
        self["key-form"].submit()

    def opened(self) -> Page:
        self.enter_key()
        self.wait(lambda: self["model-name"].text == "fox")
        return self

    def answers(self) -> list[Any]:
        return list(self.driver.find_elements("css selector", "article.assistant"))

    def note(self) -> str:
        return str(self.answers()[-1].find_element("class name", "note").text)

    def text(self) -> str:
        return str(self.answers()[-1].find_element("class name", "body").text)

    def say(self, message: str, tokens: int) -> None:
        self["max-tokens"].clear()
        self["max-tokens"].send_keys(str(tokens))
        self["message"].send_keys(message + "\n")

    def idle(self) -> bool:
        stats = self.server.service.engine.stats
        return stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0


@pytest.fixture
def page(driver: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setattr(engine, "eos_token_ids", frozenset())  # answers end by their length alone
    config = ServerConfig(api_keys=(KEY,), model_name="fox")
    with ServerHandle(engine, config=config) as server:
        driver.get_log("browser")  # what others left there
        page = Page(driver, server)
        yield page
        said = [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
        driver.execute_script("sessionStorage.clear()")  # the next server may get the same port, and would get its key
        driver.get("about:blank")
    # A browser reports every 401 as an error; nothing else may be one, a violation of the policy least of all.
    assert [message for message in said if "401 (Unauthorized)" not in message] == []


def test_a_conversation(page: Page, slow: None) -> None:
    page.enter_key("wrong")
    page.wait(lambda: "does not know" in page["key-why"].text)
    page.opened()
    stored = page.driver.execute_script("return [Object.values(sessionStorage), localStorage.length, document.cookie]")
    assert stored == [[KEY], 0, ""]

    page.say("hello", 40)
    page.wait(lambda: page.answers() and page.text())
    assert page.answers()[-1].get_attribute("aria-busy"), "the text comes while it is being written"
    page.wait(lambda: "tokens/s" in page.note())
    assert "TTFT" in page.note() and "40 tokens" in page.note()
    assert not page.answers()[-1].get_attribute("aria-busy")
    page.say("and again", 4)
    page.wait(lambda: len(page.answers()) == 2 and "4 tokens" in page.note())
    page["new-chat"].click()
    assert page.answers() == [] and page["hello"].is_displayed()


def test_the_stop_button_and_the_escape_key(page: Page, slow: None) -> None:
    page.opened()
    for stop in (lambda: page["stop"].click(), lambda: page["message"].send_keys("\ue00c")):
        page["new-chat"].click()
        page.say("hello", 450)
        page.wait(lambda: page.answers() and page.text())
        stop()
        page.wait(lambda: "stopped" in page.note())
        page.wait(page.idle)
        assert page["send"].is_displayed() and not page["stop"].is_displayed()


def test_the_engine_is_watched(page: Page, slow: None) -> None:
    page.opened()
    page.say("hello", 450)
    page["tab-engine"].click()
    page.wait(lambda: page["running"].text == "1")
    page.wait(lambda: int(page["own"].text) > 1)
    (row,) = page.wait(lambda: page["rows"].find_elements("tag name", "tr"))
    assert row.get_attribute("data-id").startswith("r")
    assert page["rate"].text != "" and not page["nobody"].is_displayed()
    assert "in use" in page["grid"].get_attribute("aria-label")
    drawn = "return new Set(arguments[0].getContext('2d').getImageData(0, 0, 200, 10).data).size"
    assert page.driver.execute_script(drawn, page["grid"]) > 3, "there are colours on the grid"

    page["tab-engine"].send_keys("\ue012")  # arrow left: the other tab
    page["stop"].click()
    page["tab-engine"].click()
    page.wait(lambda: page["running"].text == "0" and page["own"].text == "0" and page["usage"].text == "0%")
    assert page["nobody"].is_displayed()


def test_what_a_model_writes_stays_text(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    pieces = iter([hostile, "\n\n```html\n", hostile, "\n```\n\nand `", hostile, "` and **", hostile, "**\0"])
    monkeypatch.setattr(ByteDetokenizer, "append", lambda self, tokens: next(pieces, ""))
    page.opened()
    page.say(hostile, 10)
    page.wait(lambda: "10 tokens" in page.note())
    assert page.text().count(hostile) == 4
    assert page.driver.execute_script("return window.hacked") is None
    assert page["log"].find_elements("css selector", "img, script") == []
    assert len(page["log"].find_elements("css selector", "pre, p > code, p > strong")) == 3
    blocked = "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }"
    page.say("again", 10)  # with the NUL that the model wrote, which the server would refuse
    page.wait(lambda: len(page.answers()) == 2 and "10 tokens" in page.note())
    assert page.driver.execute_script(blocked), "the policy leaves no way from text to markup"
    page.driver.get_log("browser")  # that last attempt is reported


def test_a_refusal_is_shown_and_the_message_kept(page: Page) -> None:
    page.opened()
    page.say("hello", 100_000)
    page.wait(lambda: "max_tokens" in page.note())
    assert page["message"].get_attribute("value") == "hello" and page["send"].is_displayed()
    page.driver.get_log("browser")  # a browser reports every 400 as an error


def test_without_a_key_nobody_is_asked_again_and_again(page: Page) -> None:
    page.wait(page["key-dialog"].is_displayed)
    page["key-cancel"].click()
    page.wait(lambda: "no API key" in page["model-facts"].text)
    page["tab-engine"].click()
    page.wait(page["key-dialog"].is_displayed)
    page["key-cancel"].click()
    page.wait(lambda: page["lost"].text.endswith("no API key was given."))
    page["tab-chat"].click()
    page["tab-engine"].click()  # who comes back is asked
    page.enter_key()
    page.wait(lambda: page["running"].text == "0" and not page["lost"].is_displayed())


def test_reasoning_is_folded_away(page: Page) -> None:
    page.opened()
    page.driver.execute_script("""
        const deltas = [{ reasoning_content: "Hm." }, { content: "Hello" }];
        const lines = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\\n\\n`);
        window.fetch = async () => new Response(lines.join("") + "data: [DONE]\\n\\n");
    """)
    page.say("hello", 10)
    page.wait(lambda: page.answers() and page.text() == "Hello")
    folded = page.answers()[-1].find_element("tag name", "details")
    assert folded.get_attribute("open") is None and "Hm." in folded.get_attribute("textContent")


def test_the_files_are_those_that_the_page_loads(page: Page) -> None:
    page.opened()
    loaded = page.driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    static = {Path(name).name for name in loaded if "/static/" in name}
    folder = Path(__file__).parents[4] / "runtime" / "server" / "static"
    assert static == {path.name for path in folder.iterdir()} - {"index.html"}
