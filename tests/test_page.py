"""The page in a real browser: type, send, see the answer come and the rounds drawn."""

import json
import shutil
import threading
from contextlib import ExitStack, suppress

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_engine import FakeEngine  # noqa: E402
from fake_scheduler import FakeScheduler, served, steps, until  # noqa: E402
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

import dsv4  # noqa: E402
from dsv4.scheduler import Scheduler  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (apt: chromium chromium-driver)"),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=900,900"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


@pytest.fixture
def serve(nano_dir):
    """serve(script, **settings): the address of a server that answers so. Without a script: the embedded model's."""
    with ExitStack() as stack:

        def start(script=None, **settings):
            if script is None:
                engine = stack.enter_context(dsv4.Engine.load("nano", max_sessions=2))
                scheduler = stack.enter_context(Scheduler(engine))
            else:
                engine, scheduler = FakeEngine(nano_dir, max_context=8192), FakeScheduler()
                engine.identity, scheduler.script = "0123456789", script
            return stack.enter_context(served(engine, scheduler, **settings))

        yield start


class Page:
    """What a user does and sees."""

    def __init__(self, driver, address):
        self.driver = driver
        driver.get(address)
        self.until(lambda: self("#model").text)

    def __call__(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition):
        """Until a condition holds; what is not on the page yet does not fulfil it."""

        def holds():
            with suppress(NoSuchElementException, StaleElementReferenceException):
                return condition()

        until(holds)

    def send(self, text, key=Keys.ENTER):
        self("#input").send_keys(text, key)

    def wait(self, answers=1):
        self.until(lambda: len(self.all("article.assistant:not([aria-busy])")) == answers)

    def set(self, **values):
        self.driver.execute_script("for (const [k, v] of Object.entries(arguments[0])) document.getElementById(k).value = v", values)

    def content(self, selector):
        """Text as it is in the page, also where it is folded away."""
        return self.driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


def test_a_story_and_its_rounds(driver, serve, tmp_path):
    """With the embedded model: the text of the engine alone, a picture of all rounds, a speed, nothing from elsewhere."""
    server = serve()
    page = Page(driver, server.address)
    assert page("#model").text == "nano"
    page.set(temperature=0, max_tokens=80)
    page.send("Tell me a story about a wren.")
    page.wait()
    with dsv4.Engine.load("nano", max_sessions=1) as engine:
        ids = dsv4.chat.encode_ids([{"role": "user", "content": "Tell me a story about a wren."}], engine.tokenizer)
        params = dsv4.SamplingParams(temperature=0, max_tokens=80)
        assert page.content("article.assistant > .text") == "".join(step.text for step in engine.generate(ids, params))
    stats = server.service.scheduler.stats()
    assert len(page.all(".picture svg")) == stats["rounds"] > 5
    assert len(page.all(".picture .cell.accepted")) == stats["accepted"] > 5
    drawn = len(page.all(".picture .cell.accepted")) + len(page.all(".picture .cell.rejected"))
    assert drawn == stats["drafted"] and len(page.all(".picture .bar")) >= drawn
    assert f"{stats['rounds']} rounds" in page(".rounds summary").text
    assert page(".picture").get_attribute("aria-label") == page(".rounds summary").text
    assert "80 tokens" in page(".stats").text and "tokens/s" in page(".stats").text
    assert page("#send").is_enabled() and not page("#stop").is_enabled()
    driver.save_screenshot(str(tmp_path / "page.png"))
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
    fetched = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert fetched and all(name.startswith(server.address) for name in fetched)


def test_text_comes_as_it_is_made(driver, serve):
    """The first words are there before the last ones exist, thinking too; while it comes it can be stopped."""
    gate, never = threading.Event(), threading.Event()
    first, *rest = steps(["I wonder", " why</think>", "So", " it is", "!"])
    server = serve([first, gate, *rest[:3], never])
    page = Page(driver, server.address)
    page.set(thinking="high")
    page.send("Why?", Keys.NULL)
    page("#send").click()
    page.until(lambda: page(".thought .text").text == "I wonder")
    assert not page("#send").is_enabled() and page("article.assistant").get_attribute("aria-busy") == "true"
    gate.set()
    page.until(lambda: page("article.assistant > .text").text == "So it is")
    assert page(".thought .text").text == "I wonder why"
    page("#stop").click()
    page.wait()
    assert server.service.scheduler.tickets[0].cancelled.wait(10)
    assert page("[role=alert]").text == "Stopped." and page("#send").is_enabled()
    assert page.content(".thought .text") == "I wonder why" and page(".thought .text").text == ""  # folded, there
    assert page(".thought").value_of_css_property("color") != page("article.assistant > .text").value_of_css_property("color")
    assert len(page.all(".picture svg")) == 2


def test_what_the_model_says_is_text(driver, serve):
    """Markup of any kind is shown, not obeyed; so is the user's."""
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp;<b>'
    server = serve(steps([evil, "</think>", evil]))
    page = Page(driver, server.address)
    page.set(thinking="low")
    page.send(evil)
    page.wait()
    assert page.content("article.user .text") == page.content("article.assistant > .text") == evil
    assert page.content(".thought .text") == evil
    assert page.all("article img, article script, article b") == [] and driver.title == "dsv4"
    assert driver.execute_async_script(
        "const done = arguments[0]; document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective));"
        "const s = document.createElement('script'); s.textContent = 'document.title = 3'; document.body.append(s)"
    ).startswith("script-src")  # fmt: skip
    assert driver.title == "dsv4"


def test_turns_settings_and_a_new_chat(driver, serve):
    server = serve(steps(["Hm</think>", "Yes", "."]))
    page = Page(driver, server.address)
    page.set(system="Be brief.", temperature=0.5, top_p=0.9, max_tokens=7, seed=3, thinking="max")
    page.send("One?")
    page.wait()
    page.send("Two?" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "Three?")
    page.wait(answers=2)
    request = server.service.scheduler.requests[1]
    prompt = server.service.engine.tokenizer.decode(request.tokens)
    assert prompt.endswith("Be brief.<｜User｜>One?<｜Assistant｜></think>Yes.<｜end▁of▁sentence｜><｜User｜>Two?\nThree?<｜Assistant｜><think>")
    how = request.sampling
    assert (how.temperature, how.top_p, how.max_tokens, how.seed) == (0.5, 0.9, 7, 3)
    page("#reset").click()
    assert page.all("article") == []
    page.send("Four?")
    page.wait()
    assert "One?" not in server.service.engine.tokenizer.decode(server.service.scheduler.requests[2].tokens)


def test_what_goes_wrong_is_told(driver, serve):
    """A refusal gives the message back to be mended; an answer that breaks off keeps what there was."""
    server = serve(steps(["a", "b"]), key="sesame")
    page = Page(driver, server.address)
    page.send("Hello")
    page.until(lambda: page.all("[role=alert]"))
    assert "API key" in page("[role=alert]").text and page("#input").get_attribute("value") == "Hello"
    page.set(key="sesame")
    page.send("")
    page.wait()
    assert page("#model").text == "nano" and page.content("article.assistant > .text") == "ab"
    server.service.scheduler.script = [*steps(["part", "b"])[:1], ValueError("secret")]
    page.send("Again")
    page.wait(answers=2)
    assert "something broke" in page.all("[role=alert]")[-1].text and page.all("article.assistant > .text")[-1].text == "part"


def test_usable_without_a_mouse_and_on_a_phone(driver, serve):
    server = serve(steps(["A very long word: " + "o" * 300, "."] + ["x"] * 60))
    narrow = {"width": 340, "height": 700, "deviceScaleFactor": 1, "mobile": True}  # a window cannot be made so narrow
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        page = Page(driver, server.address)
        page.send("Hello")
        page.wait()
        wide = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1] == 340, "nothing sticks out"
        unnamed = driver.execute_script(
            "return [...document.querySelectorAll('input, textarea, select')].filter(e => !e.labels.length).map(e => e.id)"
        )
        assert unnamed == []
        assert page("html").get_attribute("lang") and page("#log").get_attribute("role") == "log"
        driver.execute_script("document.getElementById('input').focus()")
        reached = set()
        for _ in range(12):
            reached.add(driver.switch_to.active_element.get_attribute("id"))
            driver.switch_to.active_element.send_keys(Keys.TAB)
        assert {"input", "send", "thinking"} <= reached
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert json.loads(driver.execute_script("return JSON.stringify(Object.keys(localStorage))")) == []
