"""Take the pictures of docs/watching.md from two runs, in a headless Chromium. For NAME=dapo and NAME=grpo:

dapo train tiny run.name=NAME algorithm=NAME run.steps=80 run.eval_every=5 logging.rollouts.{per_token=true,groups=8}
python -m docs.page_picture runs/dapo runs/grpo
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from dapo_runner.tools.page.html import write_page

HERE = Path(__file__).parent
STEP, GROUP = "20", "3"  # of the first run, with a prompt that the second run has near it


def take(runs: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1500})
        page.goto(write_page(runs, Path(folder) / "page.html").as_uri())
        page.wait_for_selector(".response")
        page.screenshot(path=HERE / "page.png")
        page.emulate_media(color_scheme="dark")
        page.select_option(".where select", STEP)
        page.select_option(".run:first-child .where select >> nth=1", GROUP)
        page.wait_for_selector(".run:last-child .response .token")
        page.click(".response .token >> nth=9")
        page.evaluate("document.querySelector('#controls').previousElementSibling.scrollIntoView()")
        page.screenshot(path=HERE / "page-rollouts.png", clip={"x": 0, "y": 0, "width": 1240, "height": 900})
        browser.close()


if __name__ == "__main__":
    take([Path(run) for run in sys.argv[1:]])
