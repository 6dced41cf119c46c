"""The pictures of the page in docs/: SmolLM2 and its packaged head in bf16, a chat and a race, in a
real Chromium.

    python benchmarks/page_pictures.py [--folder docs]

On a quiet machine: the pictures show the tokens/s that were measured. The last line of stdout is
one JSON object: what the races came to. Needs Chromium, and playwright (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import Browser

from eyas.builtin import SMOLLM2
from eyas.engine.engine import EngineConfig
from eyas.serve.server import ServeConfig, running_server
from tests.browser import chromium

CHAT = "Write a Python function that counts the vowels in a text."
RACE = "A shop sells pens at 3 dollars and books at 12. What do 5 pens and 2 books cost?"
SIZE = {"width": 1280, "height": 860}
# The round of the race's speculative lane with the most accepted drafts: a token of it is clicked
# on.
PICK = """() => {
  const counts = new Map();
  for (const token of document.querySelectorAll(".lane:nth-child(2) .token.drafted"))
    counts.set(token.dataset.round, (counts.get(token.dataset.round) ?? 0) + 1);
  const [[best]] = [...counts].sort((one, other) => other[1] - one[1]);
  document.querySelector(`.lane:nth-child(2) .token[data-round="${best}"]`).click();
}"""


def take(browser: Browser, url: str, scheme: str, file: Path) -> str:
    """Chat, race, pick a round, take the picture; the race's verdict."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme)
    page.goto(url)
    page.wait_for_selector("#send:enabled")
    page.fill("#prompt", CHAT)
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    page.fill("#prompt", RACE)
    page.click("#race")
    page.wait_for_selector(".verdict")
    page.wait_for_selector("#send:enabled")
    page.click("text=more times")  # as many races as a ratio takes
    page.wait_for_selector("#stop:enabled")
    page.wait_for_selector("#send:enabled")
    page.evaluate(PICK)
    page.wait_for_timeout(500)  # the shares of the bar move
    page.screenshot(path=file)
    verdict = page.inner_text(".verdict")
    page.close()
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parents[1] / "docs")
    folder = parser.parse_args().folder
    engine = EngineConfig(speculation="fixed(6,3,12)")
    config = ServeConfig(target=SMOLLM2, head=SMOLLM2, dtype="bfloat16", port=0, engine=engine)
    verdicts = {}
    with running_server(config) as url, chromium() as browser:
        for scheme, name in (("light", "page.png"), ("dark", "page_dark.png")):
            verdicts[name] = take(browser, url, scheme, folder / name)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
