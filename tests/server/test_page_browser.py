"""The page in a real Chromium: chat, engine, crossover table, keyboard, both themes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM
from headway.core.system.json_files import write_json
from headway.server.options import ServerOptions
from server_thread import Running, running
from tables import a_page_table

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser", exc_type=ImportError)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH (Debian: apt-get install chromium)"),
]
expect = sync_api.expect
SECONDS = 20_000
"""Milliseconds that anything on the page may take on a busy machine."""


@pytest.fixture(scope="module")
def served(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a crossover table, and an engine slow enough for a hand to stop it; no answer ends before it is asked to."""
    write_json(a_page_table(), path := tmp_path_factory.mktemp("page") / "table.json")
    folder = shutil.copytree(llm.model.name, path.parent / "model")
    for name, key in (("config", "eos_token_id"), ("generation_config", "eos_token_id"), ("tokenizer_config", "eos_token")):
        file = Path(folder) / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: None}))
    measured = LLM(str(folder), kv_cache_memory="1MiB", num_threads=1, crossover_table=str(path))
    step = measured.engine.step
    measured.engine.step = lambda: (time.sleep(0.04), step())[1]
    with running(measured) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # root's Chromium starts only so
        yield found
        found.close()


@pytest.fixture
def page(browser: sync_api.Browser, served: Running) -> Iterator[sync_api.Page]:
    """The page, loaded; nothing may be wrong in its console at the end."""
    yield from _page(browser, served.url)
    served.wait_idle()


def _page(browser: sync_api.Browser, url: str, **options: object) -> Iterator[sync_api.Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.route(re.compile(rf"^(?!{re.escape(url)})https?:"), lambda route: route.abort())  # no network but the server
    page = context.new_page()
    page.set_default_timeout(SECONDS)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url) if not request.url.endswith("/completions") else None)
    page.goto(url)
    expect(page.locator("#connection")).to_have_text("connected", timeout=SECONDS)
    yield page
    context.close()
    assert not wrong


def ask(page: sync_api.Page, text: str, tokens: int = 0) -> None:
    if tokens:
        page.locator("summary", has_text="Settings").click()
        page.get_by_label("Maximum tokens").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def picture(page: sync_api.Page, name: str) -> None:
    """Keep what the page looks like where HEADWAY_PICTURES names a folder."""
    if folder := os.environ.get("HEADWAY_PICTURES"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_an_answer_streams_and_is_kept_as_a_turn(page: sync_api.Page) -> None:
    ask(page, "ban ben", tokens=60)
    answer = page.locator("#log article.assistant .text").first
    expect(answer).not_to_be_empty(timeout=SECONDS)
    early = answer.text_content() or ""
    expect(page.locator("#log")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#chat-status")).to_have_text(re.compile("first token after"), timeout=SECONDS)
    whole = answer.text_content() or ""
    assert len(whole) > len(early) > 0
    assert re.search(r"[1-9]\d* tokens, .* tokens/s", page.locator("#chat-status").text_content() or "")
    with page.expect_request("**/v1/chat/completions") as second:
        ask(page, "and then")
    sent = second.value.post_data_json
    assert [(each["role"], each["content"]) for each in sent["messages"]] == [
        ("user", "ban ben"),
        ("assistant", whole),
        ("user", "and then"),
    ]
    assert sent["max_completion_tokens"] == 60
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=SECONDS)


def test_reasoning_is_folded_above_its_answer(page: sync_api.Page) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm "}, {"reasoning": "hm"}, {"content": "Yes"}, {}]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None if delta else "stop"}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "ban ben")
    expect(page.locator("#log article.assistant > .text")).to_have_text("Yes", timeout=SECONDS)
    expect(page.locator("#log article.assistant details .text")).to_be_hidden()
    page.locator("summary", has_text="Reasoning").click()
    expect(page.locator("#log article.assistant details .text")).to_have_text("hm hm")


def test_stop_button_ends_the_request_in_the_engine(page: sync_api.Page, served: Running) -> None:
    ask(page, "ban ben", tokens=150)
    expect(page.locator("#log article.assistant .text")).not_to_be_empty(timeout=SECONDS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_have_text(re.compile("stopped"), timeout=SECONDS)
    served.wait_idle(2.0)  # all of it would have taken 6 s
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()


def test_the_panels_fill(page: sync_api.Page) -> None:
    ask(page, "ban ben", tokens=150)
    expect(page.locator("#running")).to_have_text("1", timeout=SECONDS)
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]"), timeout=SECONDS)
    decode = page.locator(".phase", has_text="decode")
    expect(decode).to_have_class("phase busy", timeout=SECONDS)
    expect(decode).to_contain_text(
        re.compile(r"1 sequence of \d+ tokens: .* of attention in a step, sdpa(\.math)? takes [\d.]+×")
    )
    expect(page.locator("#requests tbody tr")).to_have_count(1)
    expect(page.locator("#requests tbody")).to_contain_text("chatcmpl-")
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator(".scroll", has=page.locator("#requests")).evaluate("each => each.scrollWidth <= each.clientWidth")
    assert page.locator("#map i.own").count() >= 1
    assert page.locator("#map i.free").count() >= 1
    picture(page, "dark-or-light")
    page.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0", timeout=SECONDS)
    expect(page.locator("#requests")).to_be_hidden()


def test_the_table_is_explored_by_mouse_and_keyboard(page: sync_api.Page) -> None:
    answer = page.locator("#answer")
    cells = page.locator("#heat button")
    expect(cells).to_have_count(4)
    cells.first.focus()
    page.keyboard.press("Enter")
    expect(answer).to_contain_text(re.compile(r"^sdpa\.math — 1 sequence of 16 tokens: .*sdpa takes 2\.90× as long"))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    expect(answer).to_contain_text(re.compile(r"^sdpa — 4 sequences of 256 tokens"))
    expect(cells.nth(3)).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Phase").select_option("prefill")
    page.get_by_label("Tokens per sequence", exact=True).fill("900")
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("outside the measured range")
    page.locator("summary", has_text="cannot run").click()
    expect(page.locator("#refused dt", has_text="hopper_mla")).to_have_count(1)  # not once for each phase
    reasons = page.locator("#refused dd").all_text_contents()
    assert len(reasons) == len(set(reasons)) > 1, "backends with the same reasons are listed together"


def test_without_measured_times_the_page_says_how_to_get_them(browser: sync_api.Browser, everyday: Running) -> None:
    for page in _page(browser, everyday.url):
        expect(page.locator("#unmeasured")).to_contain_text(
            "start the server with --attn-backend auto (the default) and without --no-autotune"
        )
        for each in ("#look-up", "#answer", "#heat-hint", "#history"):
            expect(page.locator(each)).to_be_hidden()
        expect(page.locator("#most")).to_contain_text("Send a message")
        assert page.locator("body").inner_text().count("no crossover table") == 1
    everyday.wait_idle()


def test_everything_is_reached_by_keyboard(page: sync_api.Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the message field")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")  # Chromium begins where the link led
    page.get_by_label("Message").focus()
    page.keyboard.type("ban")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("ben")
    page.keyboard.press("Enter")
    expect(page.locator("#log article.user .text")).to_have_text("ban\nben")
    expect(page.locator("#log article.assistant .text")).not_to_be_empty(timeout=SECONDS)
    page.keyboard.press("Escape")
    expect(page.locator("#chat-status")).to_have_text(re.compile("stopped"), timeout=SECONDS)
    reached = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        if focused.count():
            reached.add(focused.get_attribute("id") or focused.text_content())
            assert focused.evaluate("each => getComputedStyle(each).outlineStyle") == "solid", "the focus shows"
    assert reached >= {"theme", "clear", "log", "prompt", "send", "phase", "batch", "kv-len", "Settings", "Look up"}, reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_at_every_width(browser: sync_api.Browser, served: Running, scheme: str) -> None:
    for page in _page(browser, served.url, color_scheme=scheme):
        for width in (360, 1280, 1900):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
            picture(page, f"{scheme}-{width}")
        ground, ink = (
            page.locator("body").evaluate(f"each => getComputedStyle(each).{name}") for name in ("backgroundColor", "color")
        )
        assert (_brightness(ground) > _brightness(ink)) == (scheme == "light")
        other = {"light": "dark", "dark": "light"}[scheme]
        theme = page.locator("#theme")
        while theme.text_content() != f"Theme: {other}":
            theme.click()
        turned = page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
        assert (_brightness(turned) > 128) == (other == "light")
    served.wait_idle()


def _brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_a_key_is_asked_for_and_kept_by_the_tab_alone(browser: sync_api.Browser, llm: LLM) -> None:
    with running(llm, ServerOptions(api_key="secret", served_model_names=("tiny",))) as keyed:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(SECONDS)
        page.goto(keyed.url)
        expect(page.locator("#connection")).to_have_text("an API key is needed")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text(re.compile("not valid"), timeout=SECONDS)
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("connected", timeout=SECONDS)
        kept = page.evaluate("() => [JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]")
        assert ["secret" in each for each in kept] == [False, False, True]
        other = context.new_page()
        other.goto(keyed.url)
        expect(other.locator("#connection")).to_have_text("an API key is needed")
        context.close()


def test_page_shows_answers_and_errors_as_plain_text(page: sync_api.Page) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    events = f'data: {{"choices": [{{"delta": {{"content": "{evil}"}}, "finish_reason": "stop"}}]}}\n\ndata: [DONE]\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=events))
    ask(page, evil)
    expect(page.locator("#log article.user .text")).to_have_text(evil)
    expect(page.locator("#log article.assistant .text")).to_have_text(evil)
    assert page.locator("#log img, #log script").count() == 0
    error = 'data: {"error": {"message": "<b>broken</b>"}}\n\n'
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=error))
    ask(page, "again")
    expect(page.locator("#log article.error .text")).to_have_text("<b>broken</b>")
    expect(page.get_by_label("Message")).to_have_value("again")
