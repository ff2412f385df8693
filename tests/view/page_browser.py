"""A page in Chromium that reports console errors, dialogs and foreign requests."""

import os
import shutil
from contextlib import contextmanager

from playwright.sync_api import Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 60_000
"""Time limit in milliseconds, which only a broken page exceeds."""
expect.set_options(timeout=WAIT)


def chromium_path():
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found, f"these tests look at the page in a browser: install Chromium (apt-get install chromium), as {NAMES}"
    return found


@contextmanager
def chromium():
    with sync_playwright() as playwright:
        # Chromium refuses its own sandbox as root; the pages are ours.
        words = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.getuid() == 0 else [])]
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=words)
        yield browser
        browser.close()


@contextmanager
def opened(browser, url, width=1280, height=800, **more):
    """Open a page at `url`, and check at the end that it had no errors."""
    context = browser.new_context(viewport={"width": width, "height": height}, **more)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    troubles = watch(page)
    page.goto(url)
    page.locator("main:not([aria-busy])").wait_for()
    yield page
    assert page.evaluate("window.pwned") is None
    context.close()
    assert troubles == []


def watch(page: Page):
    """Collect the errors of the page."""
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))

    def refuse(dialog):
        troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", refuse)
    return troubles


def until(page, condition, argument=None):
    """Wait until a JavaScript function returns true."""
    page.wait_for_function(condition, arg=argument)


def fits(page):
    """Nothing is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")
