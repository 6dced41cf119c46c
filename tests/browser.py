"""The system's Chromium, driven by playwright, without requests of its own."""

import json
import re
import shutil
import subprocess
from contextlib import contextmanager

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed here: apt-get install chromium"
)


@contextmanager
def chromium():
    """A playwright browser; pages are made of it."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - it takes 0.3 s

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def run_chromium(folder, *options):
    """What Chromium writes with these options and a profile of its own."""
    command = [CHROMIUM, *FLAGS, "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
    return subprocess.run([*command, *options], capture_output=True, timeout=600, check=True).stdout


def framed(folder, html, widths):
    """[width of the contents, of the window, number of flat pictures] of a page in frames of these
    widths: a browser's own window has 500 pixels at least.
    """
    measured = """<script>
      const flat = [...document.querySelectorAll("svg")].filter(
        one => one.getBoundingClientRect().height < 90).length;
      parent.postMessage([document.documentElement.scrollWidth, innerWidth, flat], "*");
    </script></body>"""
    (folder / "framed.html").write_text(html.replace("</body>", measured), encoding="utf-8")
    frame = '<iframe src="framed.html" style="height:5000px;border:0;width:{}px"></iframe>'
    page = folder / "frames.html"
    page.write_text(
        "<body><script>const all = []; addEventListener('message', event => "
        "{ all.push(event.data); document.title = JSON.stringify(all) })</script>"
        + "".join(map(frame.format, widths))
    )
    window = (f"--window-size={sum(widths) + 1000},5000", "--virtual-time-budget=3000")
    seen = run_chromium(folder, *window, "--dump-dom", page.as_uri()).decode()
    return json.loads(re.search(r"<title>(\[.*?\])</title>", seen).group(1))
