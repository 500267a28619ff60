"""An image of a run's page as a browser shows it, with words pinned and a spot kept.

Needs playwright (pip install "sdattn[browser]") and a Chromium.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("out", type=Path, help="the image's file, .png")
    parser.add_argument("--words", nargs="+", default=("cat", "pizza"))
    parser.add_argument("--spot", type=float, nargs=2, default=(0.28, 0.5), help="in [0, 1]")
    parser.add_argument("--size", type=int, nargs=2, default=(1180, 720))
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("No chromium was found on the PATH: apt install chromium.")
    width, height = options.size
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if options.dark else "light",
        )
        page.goto((options.run / "report.html").resolve().as_uri())
        page.wait_for_selector("html[data-ready]")
        page.keyboard.press("Escape")  # unpins what the page opens with
        for word in options.words:
            page.get_by_role("button", name=word, exact=True).first.click()
        box = page.locator("#image").bounding_box()
        x, y = (at * box[side] for at, side in zip(options.spot, ("width", "height"), strict=True))
        page.mouse.click(box["x"] + x, box["y"] + y)
        page.mouse.move(2, 2)
        page.screenshot(path=options.out)
        browser.close()


if __name__ == "__main__":
    main()
