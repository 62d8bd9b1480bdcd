"""The pictures of docs/report.md: `python docs/screenshots.py [BROWSER]`, with pip install '.[lab,test]'.

BROWSER is the path of a Chromium; chromium on the PATH by default.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from parzen.lab.experiments import find_runs
from parzen.lab.experiments.claims import Results
from parzen.lab.reports.document import html
from parzen.lab.reports.groups import group
from parzen.lab.reports.ledger import claims as claims_at

ROOT = Path(__file__).parent.parent


def main(browser: str) -> None:
    """Writes docs/images/report-*.png from results/stories."""
    claims = [claim for claim in claims_at("small") if claim.id.startswith("figure2/small/4/")]
    results = Results(ROOT / "results")
    text = html(
        group(find_runs([ROOT / "results" / "stories" / "runs"])),
        [(claim, claim.decide(results)) for claim in claims],
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "index.html")
        file.write_text(text, encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=browser)
        for name, scheme, width, height, top, plot in (
            ("claims", "light", 1200, 900, "h1", None),
            ("curves", "light", 1200, 560, "#loss h2", "#loss .chart:nth-child(2) .plot"),
            ("dark", "dark", 1200, 900, "#attention h2", "#attention .chart:nth-child(2) .plot"),
            ("phone", "light", 360, 720, "#loss .legend", "#loss .plot"),
        ):
            page = chromium.new_page(
                viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
            )
            page.goto(file.as_uri())
            page.evaluate(
                f"scrollTo(0, scrollY + document.querySelector('{top}').getBoundingClientRect().y - 16)"
            )
            if plot:
                box = page.locator(plot).first.bounding_box()
                page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.5 * box["height"])
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            image.save(ROOT / "docs" / "images" / f"report-{name}.png", optimize=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium") or "chromium")
