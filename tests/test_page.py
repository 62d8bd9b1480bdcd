"""The page of a report: text stays text, colours can be read, and what it offers works in a browser.

The last part needs Chromium (Debian: apt-get install chromium) and is skipped where there is none.
"""

import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from run_folders import add_run, add_runs

from parzen.lab.experiments import find_runs
from parzen.lab.experiments.claims import LOSS, Claim, Outcome, Place, Within
from parzen.lab.reports import page
from parzen.lab.reports.document import html
from parzen.lab.reports.figures import COLORS, MAP, Chart, Map, Series, luminance, on
from parzen.lab.reports.groups import group
from parzen.lab.reports.ledger import FAILS, HOLDS, NOT_RUN, UNSURE

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CLAIMS = [
    (Claim(f"figure9/{i}", "Figure 9", "small", text, Within(Place("<b>here</b>", ""), LOSS, ())), result)
    for i, (text, result) in enumerate(
        [
            ("<i>all</i> is <script>hacked = 1</script>", Outcome(HOLDS, "a over b: 0.1 ± 0.0")),
            ("never", Outcome(FAILS, "c-1 over d: -0.5 ± 0.1")),
            ("perhaps", Outcome(UNSURE, "<img src=x onerror='hacked = 1'>")),
            ("later", Outcome(NOT_RUN)),
        ]
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return add_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def written(folder):
    return html(group(find_runs([folder])), CLAIMS).encode(errors="replace").decode()


class Reader(HTMLParser):
    """Elements with their attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open, self.code = [], "", [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.code += data
        else:
            self.text += data

    def of(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


# ---- the file ------------------------------------------------------------------------------------


def test_the_page_asks_for_nothing_and_data_is_only_text(written):
    read = Reader(written)
    assert not read.open
    for tag, attributes in read.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                assert value.startswith(("#", "data:")), (tag, name, value)
            assert "url(" not in (value or ""), (tag, name, value)
    assert "@import" not in read.code
    assert "url(" not in read.code
    # The one script is ours; the words of the sentence, of the claims and of the environment are text.
    assert len(read.of("script")) == 1
    assert not read.of("i", "img")
    assert "<script>alert" in read.text
    assert "<i>all</i> is <script>hacked = 1</script>" in read.text
    assert "<b>x</b>" in read.text
    assert "&amp;" in read.text
    assert "$x_1$" in read.text
    assert "/home/me" not in read.text
    assert "parzen compare --data b.txt" in read.text
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"].removeprefix("#") for a in read.of("a")} <= set(ids)


def test_what_cannot_be_seen_is_said(written):
    read = Reader(written)
    levels = [int(tag[1]) for tag, _ in read.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    named = [a for a in read.of("svg") if "viewbox" in a]
    assert len(named) > 20
    assert all(a.get("aria-hidden") == "true" or (a["role"] == "img" and a["aria-label"]) for a in named)
    assert all(a["aria-label"] for a in read.of("table"))
    assert all("scope" in a for a in read.of("th"))
    assert len(read.of("figure")) == len(read.of("figcaption")) == 3
    assert any(a.get("lang") == "en" for a in read.of("html"))
    charts = [a["aria-label"] for a in named if "Curves end at" in a.get("aria-label", "")]
    assert len(charts) == 2
    assert re.search(r"1 layer: .*biweight† 2\.2\d\d at 12k", charts[0])


def test_claims_come_first(written):
    read = Reader(written)
    assert [a["id"] for a in read.of("section")] == [
        *("claims", "results", "loss", "support", "attention", "runs")
    ]
    for text in (
        "1holds",
        "1does not hold",
        "1cannot tell",
        "1not run",
        "✓ holds",
        "✗ does not hold",
        "c-1 over d: −0.5 ± 0.1",
    ):
        assert text in read.text
    without = Reader(html([]))
    assert without.of("section")[0]["id"] == "results"


def test_curves_do_not_lose_seeds_whose_batches_hold_some_tokens_more(tmp_path):
    add_run(tmp_path, seed=0)
    file = add_run(tmp_path, seed=1).folder / "metrics.jsonl"
    file.write_text(re.sub(r'"tokens": (\d+)000', r'"tokens": \g<1>030', file.read_text()))
    read = html(group(find_runs([tmp_path])))
    # The last evaluation, half way between the two.
    assert re.search(r'<th scope="row">12,015</th><td>2\.\d{3} ± 0\.0\d\d</td>', read)


def test_a_run_that_diverged_has_the_curve_that_it_has(tmp_path):
    add_run(tmp_path, "biweight", finished=False)
    file = add_run(tmp_path, seed=0).folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[6:] = [re.sub(r'"loss": [\d.]+', '"loss": NaN', line) for line in lines[6:]]
    file.write_text("".join(lines))
    add_run(tmp_path, "triweight", results={"exact_match": {"far": 1, "8": None}})
    read = html(group(find_runs([tmp_path])))
    assert not re.search(r"\bnan\b", read.partition("<section")[2].partition('id="runs"')[0])
    assert "gaussian 2.647 at 6k" in read
    assert "biweight (unfinished) 2.780 at 5k" in read
    assert "biweight (unfinished)</li>" in read


def test_a_chart_is_drawn_where_its_numbers_are():
    one = Series("a", (0.0, 50.0, 100.0), (1.0, 2.0, 3.0), (0.5, 0.5, 0.5), style=1)
    drawn = page.charts([Chart("t", "x", "y", (one,), (0.0, 4.0), bounds=(0.75, 9.0))], "c")
    curve = drawn[drawn.index('<g class="series') :]
    line, band = (re.search(rf'class="{name}" d="M([^Z"]+)', curve).group(1) for name in ("line", "band"))
    points = np.array([[float(n) for n in p.split()] for p in line.split("L")])
    # x runs from 0 to 3 % beyond the last, y from 4 at the top down to 0.
    np.testing.assert_allclose(points[:, 0], page.ACROSS * np.array([0, 0.5, 1]) / 1.03, atol=0.051)
    np.testing.assert_allclose(points[:, 1], page.DOWN * np.array([0.75, 0.5, 0.25]), atol=0.051)
    edge = [float(p.split()[1]) for p in band.split("L")]
    np.testing.assert_allclose(
        edge, page.DOWN * (1 - np.array([0.75, 1.5, 2.5, 3.5, 2.5, 1.5]) / 4), atol=0.051
    )
    assert "<td>2.000 ± 0.500</td>" in drawn


def test_more_curves_than_colours_have_dashes():
    styles = [Series("a", (1.0,), (1.0,), style=i) for i in range(2 * len(COLORS))]
    assert len({(s.color, s.dashes) for s in styles}) == len(styles)
    assert Series("a", (1.0,), (1.0,), finished=False).dashes not in {s.dashes for s in styles}


def test_a_map_shows_what_is_positive():
    values = np.array([[0.0, 0.0], [0.25, 1.0]])
    drawn = page.maps([Map("t", "p", "r", "c", values, ("a", "b"), ("a", "b"), 1.0, False)], "c")
    assert re.findall(r'<path fill="(#\w+)" d="([^"]+)"', drawn) == sorted(
        (page._hex(MAP(share)[:3]), f"M{x} 12h12v12h-12z") for share, x in ((0.5, 0), (1.0, 12))
    )
    assert '<th scope="row">b</th><td>b 1.000, a 0.250</td><td>2</td>' in drawn
    assert '<th scope="row">a</th><td>—</td><td>0</td>' in drawn
    assert "2 of 4 weights are 0" in drawn


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_and_curves_can_be_read_on_light_and_dark():
    light, dark = (
        {
            name: [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
            for name, digits in re.findall(r"--(\w+): #(\w{6})", block)
        }
        for block in re.findall(r":root \{(.*?)\}", page.STYLE, re.DOTALL)[:2]
    )
    assert light.keys() == dark.keys()
    assert {f"c{i}" for i in range(len(COLORS))} <= light.keys()
    for colors in (light, dark):
        for text in ("ink", "soft", "hot", "good", "bad", "unsure"):
            assert contrast(colors[text], colors["paper"]) >= 4.5, text
            assert contrast(colors[text], colors["raised"]) >= 4.5, text
        for i in range(len(COLORS)):
            assert contrast(colors[f"c{i}"], colors["paper"]) >= 3, i
    for share in np.linspace(0, 1, 256):
        ink = 0.0 if on(MAP(share)[:3]) == "black" else 1.0
        assert contrast(MAP(share)[:3], [ink] * 3) >= 4.5


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, written, tmp_path):
    """Opens a page; whatever it says on the console or asks for is an error."""
    contexts, said = [], []

    def open_page(text=written, width=1280, **options):
        file = tmp_path / "index.html"
        file.write_text(text, encoding="utf-8")
        context = chromium.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on(
            "request", lambda request: said.append(request.url) if request.url != file.as_uri() else None
        )
        shown.goto(file.as_uri())
        return shown

    open_page.said = said
    yield open_page
    for context in contexts:
        context.close()
    assert [entry for entry in said if not entry.startswith("data:")] == []


def column(shown, table, at):
    return shown.eval_on_selector_all(
        f"#{table} tbody tr", f"rows => rows.map(row => row.cells[{at}].textContent)"
    )


def number(text):
    found = re.match(r"[+−]?[\d.,]+", text)
    return float(found[0].replace("−", "-").replace(",", "")) if found else None


def test_no_data_run_as_script(opened):
    shown = opened()
    shown.wait_for_timeout(200)
    assert shown.evaluate("typeof hacked") == "undefined"
    # The policy stops what might slip through.
    blocked = shown.evaluate(
        """() => { const script = document.createElement("script"); script.textContent = "hacked = 1";
        return new Promise(done => { addEventListener("securitypolicyviolation", () => done(typeof hacked));
        document.body.append(script); setTimeout(() => done("ran"), 500); }); }"""
    )
    assert blocked == "undefined"
    assert "Content Security Policy" in opened.said.pop()


@pytest.mark.parametrize("how", ["click", "Enter", "Space"])
def test_a_header_sorts_its_table(opened, how):
    shown = opened()
    headers = [text.strip() for text in shown.locator("#results thead th").all_inner_texts()]
    before = [*zip(*(column(shown, "results", i) for i in range(len(headers))), strict=True)]
    for name, key in (
        ("validation loss", number),
        ("loss − gaussian", number),
        ("setting", str),
        ("kernel", str),
    ):
        at = headers.index(name)
        head = shown.locator("#results thead th").nth(at)
        button = head.get_by_role("button")
        for direction, sign in (("ascending", 1), ("descending", -1)):
            if how == "click":
                button.click()
            else:
                button.focus()
                shown.keyboard.press(how)
            assert head.get_attribute("aria-sort") == direction
            assert shown.locator("#results th[aria-sort]").count() == 1
            values = [key(text) for text in column(shown, "results", at)]
            known = [value for value in values if value is not None]
            assert known == sorted(known, reverse=sign < 0)
            # What is no number is last either way.
            assert values[: len(known)] == known
            assert len(set(known)) > 1
    after = [*zip(*(column(shown, "results", i) for i in range(len(headers))), strict=True)]
    assert sorted(after) == sorted(before)


def test_signs_and_thousands_are_numbers(opened):
    cells = ["2.5 ± 9.0", "—", "−0.5", "+0.1", "1,000"]
    rows = [[f"{i} layers", cell] for i, cell in zip((12, 4, 1, 8, 2), cells, strict=True)]
    shown = opened(page.document("t", "", [page.Section("a", "A", page.table(["n", "x"], rows, "t"))]))
    shown.get_by_role("button", name="x").click()
    assert column(shown, "a", 1) == ["−0.5", "+0.1", "2.5 ± 9.0", "1,000", "—"]
    shown.get_by_role("button", name="x").click()
    assert column(shown, "a", 1) == ["1,000", "2.5 ± 9.0", "+0.1", "−0.5", "—"]
    shown.get_by_role("button", name="n").click()
    assert column(shown, "a", 0) == ["1 layers", "2 layers", "4 layers", "8 layers", "12 layers"]


def test_an_entry_of_the_legend_hides_its_curves(opened):
    shown = opened()

    def visible():
        return shown.eval_on_selector_all(
            "#loss g.series", "all => all.filter(g => g.getClientRects().length).map(g => g.dataset.k)"
        )

    entry = shown.locator("#loss .legend button").filter(has_text="biweight")
    key = entry.evaluate("button => button.parentElement.dataset.k")
    assert visible().count(key) == 2
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert key not in visible()
    assert visible()
    entry.press("Space")
    assert entry.get_attribute("aria-pressed") == "true"
    assert visible().count(key) == 2
    shown.get_by_role("button", name="Hide all").click()
    assert visible() == []
    entry.click()
    assert set(visible()) == {key}


def test_a_figure_shows_the_values_under_the_pointer_and_by_keys(opened):
    shown = opened()
    plot = shown.locator("#loss .plot").first
    readout, mark = plot.locator(".readout"), plot.locator(".mark")
    rows = shown.locator("#loss .chart").first.locator(".values tbody tr")
    assert readout.is_hidden()
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for share, row in ((0.02, 0), (0.999, 11)):
        shown.mouse.move(box["x"] + share * box["width"], box["y"] + 0.5 * box["height"])
        assert readout.is_visible()
        assert mark.evaluate("mark => getComputedStyle(mark).display") == "inline"
        head, *cells = rows.nth(row).evaluate("row => [...row.cells].map(cell => cell.textContent)")
        assert readout.inner_text().startswith(f"training tokens: {head}")
        found = re.findall(r"\d\.\d{3} ± \d\.\d{3}", readout.inner_text())
        assert found == sorted(cells, reverse=True)
    shown.mouse.move(0, 0)
    assert readout.is_hidden()
    plot.focus()
    assert plot.get_attribute("role") == "slider"
    for key, row in (("Home", 0), ("ArrowRight", 1), ("ArrowLeft", 0), ("End", 11), ("ArrowRight", 11)):
        plot.press(key)
        assert plot.get_attribute("aria-valuenow") == str(row)
        assert rows.nth(row).locator("th").text_content() in plot.get_attribute("aria-valuetext")
    plot.press("Escape")
    assert readout.is_hidden()

    words = shown.locator("#attention .plot").first
    words.focus()
    words.press("Home")
    words.press("ArrowDown")
    assert words.get_attribute("aria-valuenow") == "1"
    assert words.get_attribute("aria-valuetext").startswith("looking: upon; looked at most Once 0.")
    assert words.locator(".mark").is_visible()


def test_a_command_is_copied(opened):
    shown = opened(permissions=["clipboard-read", "clipboard-write"])
    button = shown.locator(".command button").first
    button.click()
    shown.get_by_text("Copied").wait_for()
    assert shown.evaluate("navigator.clipboard.readText()") == "parzen compare --data b.txt"


def test_the_page_fits_a_phone(opened):
    shown = opened(width=360)
    shown.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    shown.locator("#loss .plot").first.focus()
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360
    # Wide tables scroll, and keep the name of the row in sight.
    moved = shown.evaluate(
        """() => { const box = document.querySelector("#results .wide"); box.scrollLeft = 1e6;
        return [box.scrollLeft, box.querySelector("tbody th").getBoundingClientRect().left]; }"""
    )
    assert moved[0] > 100
    assert 0 <= moved[1] < 30


BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_no_barrier_is_found(opened, scheme, width):
    """By axe, contrast and names included, with everything open."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    shown = opened(width=width, color_scheme=scheme)
    shown.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    results = axe.Axe().run(shown)
    assert results.violations_count == 0, results.generate_report()


def test_dark_still_and_printed(opened):
    light, dark = opened(), opened(color_scheme="dark", reduced_motion="reduce")
    assert light.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    assert dark.evaluate(BACKGROUND) == "rgb(21, 25, 29)"
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert [shown.evaluate(scrolling) for shown in (light, dark)] == ["smooth", "auto"]
    line = "getComputedStyle(document.querySelector('#loss .line')).stroke"
    assert light.evaluate(line) != dark.evaluate(line)
    dark.emulate_media(media="print")
    assert dark.evaluate(BACKGROUND) == "rgb(255, 255, 255)"
    assert dark.evaluate(line) == light.evaluate(line)
    assert dark.locator("nav").is_hidden()
    assert dark.locator("#results table").is_visible()
    dark.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert dark.locator("#support table").last.is_visible()


def test_all_is_there_without_javascript(opened):
    shown = opened(java_script_enabled=False)
    assert shown.locator("button").count() == 0
    assert shown.locator("#results table").is_visible()
    assert shown.locator("#loss svg[role=img]").first.is_visible()
    fold = shown.locator("#loss .values").first
    fold.locator("summary").click()
    assert fold.locator("table").is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories", "regbench", "length/sort"])
def test_the_pages_of_the_committed_results(opened, name):
    text = html(group(find_runs([ROOT / "results" / name / "runs"])))
    assert len(text.encode()) < 1_000_000
    shown = opened(text, width=360)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 360
    assert shown.locator("svg[role=img], .plot svg").count() > 0
