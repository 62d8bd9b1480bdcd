"""One HTML page of tables, charts and maps that asks the network for nothing.

All text comes in plain and goes out escaped. Everything can be read without JavaScript: the values of each
figure are a table below it. ``page.js`` adds buttons that sort tables, hide curves and copy commands, and
shows in a figure the values under the pointer; ``page.css`` has the colours of light and of dark pages.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from parzen.lab.reports.figures import Chart, Map, Series, digits, on
from parzen.lab.statistics import Estimate

NONE = "—"
HERE = Path(__file__).parent
STYLE, SCRIPT = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of its element, for links.
        title: its heading.
        body: HTML.
    """

    id: str
    title: str
    body: str


def document(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page.

    Args:
        title: plain text, of the window and the first heading.
        lead: HTML that comes before the first section.
        sections: in order.
    """
    # Only this script runs, and nothing is fetched, whatever the data say.
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    links = "".join(f'<li><a href="#{one.id}">{escape(one.title)}</a></li>' for one in sections)
    parts = "".join(
        f'<section id="{one.id}" aria-labelledby="{one.id}-title">\n'
        f'<h2 id="{one.id}-title">{escape(one.title)}</h2>\n{one.body}</section>\n'
        for one in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<header>\n<h1>{escape(title)}</h1>\n{lead}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f"<main>\n{parts}</main>\n<script>{SCRIPT}</script>\n</body></html>\n"
    )


def paragraphs(texts: Iterable[str]) -> str:
    """Each of ``texts`` as one."""
    return "".join(f"<p>{escape(text)}</p>\n" for text in texts)


# ---- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell that is more than its text: ``html`` comes after it, ``kind`` is its class."""

    text: str
    html: str = ""
    kind: str = ""


def table(headers: Sequence[str], rows: Sequence[Sequence[str | Cell]], name: str) -> str:
    """A table that can be sorted, in a box that scrolls by itself.

    Args:
        headers: of the columns; the first column names the rows.
        rows: columns of numbers are set to the right and sorted by value.
        name: what the table is, for those who cannot see it.
    """
    cells = [[Cell(c) if isinstance(c, str) else c for c in row] for row in rows]
    number = [all(_is_number(row[i].text) for row in cells) for i in range(len(headers))]
    head = "".join(
        f'<th scope="col"{_class("n" if n else "")}>{escape(h)}</th>'
        for h, n in zip(headers, number, strict=True)
    )
    body = ""
    for first, *others in cells:
        row = f'<th scope="row"{_class(first.kind)}>{escape(first.text)}{first.html}</th>'
        for cell, n in zip(others, number[1:], strict=True):
            row += f"<td{_class(cell.kind or 'n' * n)}>{escape(cell.text)}{cell.html}</td>"
        body += f"<tr>{row}</tr>\n"
    return _box(
        f'<table class="sorts" aria-label="{escape(name)}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table>",
        name,
    )


def _box(html: str, name: str) -> str:
    """``html`` scrolls, by keyboard too, where it is too wide."""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(name)}">{html}</div>\n'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[+−]?[\d,.]+%?( ± [\d,.]+%?)?†?", text)) or text in ("", NONE, "unfinished")


def pairs(entries: Mapping[str, str]) -> str:
    """What is the same for all: a list of names and values."""
    listed = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in entries.items())
    return f"<dl>{listed}</dl>\n"


def command(text: str) -> str:
    """Something to copy."""
    return f'<div class="command"><pre tabindex="0"><code>{escape(text)}</code></pre></div>\n'


def folded(title: str, html: str, kind: str, opened: bool = False) -> str:
    """``html`` behind its title."""
    state = " open" if opened else ""
    return f'<details class="{kind}"{state}><summary>{escape(title)}</summary>\n{html}</details>\n'


def whisker(number: Estimate | None, reach: float, two: bool = False) -> str:
    """A small picture of a number and its interval around 0; ``reach`` is the end of the scale.

    An interval from ``two`` seeds alone is drawn broken.
    """

    def place(x: float) -> str:
        return f"{60 + 55 * max(-1.0, min(1.0, x / reach)):.1f}"

    drawn = '<path class="zero" d="M60 1V15"/>'
    if number and number.freedom:
        half = number.half()
        start, end = place(number.mean - half), place(number.mean + half)
        drawn += f'<path class="bar{" two" * two}" d="M{start} 8H{end}"/>'
    if number:
        kind = "point" if number.freedom else "point lone"
        drawn += f'<circle class="{kind}" cx="{place(number.mean)}" cy="8" r="3.5"/>'
    return f'<svg class="whisker" viewBox="0 0 120 16" aria-hidden="true">{drawn}</svg>'


# ---- charts --------------------------------------------------------------------------------------

# Of a chart, and of the rectangle inside its axes.
WIDTH, HEIGHT = 400, 290
LEFT, TOP, RIGHT, BOTTOM = 44, 26, 8, 44
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def charts(panels: Sequence[Chart], caption: str) -> str:
    """A figure of charts under one legend."""
    # One for all curves of a name; that it is unfinished is said where none is finished.
    every = sorted((s for chart in panels for s in chart.series), key=lambda s: (s.style, s.finished))
    series = {s.style: s for s in every}.values()
    legend = "".join(
        f'<li data-k="{s.style}"><svg viewBox="0 0 24 8" class="c{s.color}" aria-hidden="true">'
        f'<path class="line"{_dashes(s.dashes)} d="M0 4H24"/></svg>{escape(s.label)}</li>'
        for s in series
    )
    return (
        f'<figure class="charts"><figcaption>{escape(caption)}</figcaption>\n'
        f'<ul class="legend" aria-label="Curves">{legend}</ul>\n'
        f'<div class="panels">\n{"".join(map(_chart, panels))}</div></figure>\n'
    )


def _dashes(lengths: Sequence[float]) -> str:
    return f' stroke-dasharray="{" ".join(f"{1.8 * x:g}" for x in lengths)}"' if lengths else ""


def _chart(chart: Chart) -> str:
    found = sorted({x for s in chart.series for x in s.x})
    bottom, top = chart.limits
    if chart.ticks:
        # Half a doubling of room on either side.
        left, right = math.log2(min(chart.ticks)) - 0.5, math.log2(max(chart.ticks)) + 0.5
    else:
        left, right = 0.0, 1.03 * max(found, default=1.0)

    def across(x: float) -> float:
        at = math.log2(x) if chart.ticks else x
        return ACROSS * (at - left) / (right - left)

    def down(y: float) -> float:
        # Far beyond the picture all places look alike.
        return max(-9e3, min(9e3, DOWN * (top - y) / (top - bottom)))

    def path(xs: Iterable[float], ys: Iterable[float]) -> str:
        return "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in zip(xs, ys, strict=True))

    ticks = [float(t) for t in chart.ticks] or _ticks(left, right)
    levels = _ticks(bottom, top)
    grid = "".join(f"M0 {down(y):.1f}H{ACROSS}" for y in levels)
    grid += "".join(f"M{across(x):.1f} 0V{DOWN}" for x in ticks)
    inside = f'<path class="grid" d="{grid}"/>'
    if chart.shaded:
        start, end = map(across, chart.shaded)
        inside += f'<rect class="shade" x="{start:.1f}" width="{end - start:.1f}" height="{DOWN}"/>'
    for s in chart.series:
        low, high = chart.band(s)
        band = f"{path(s.x, low)}L{path(s.x[::-1], high[::-1])}Z" if s.half else ""
        dots = "".join(
            f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5"/>'
            for x, y in zip(s.x, s.y, strict=True)
            if chart.ticks or len(s.x) == 1
        )
        inside += (
            f'<g class="series c{s.color}" data-k="{s.style}">'
            + (f'<path class="band{" two" * s.two}" d="M{band}"/>' if band else "")
            + f'<path class="line"{_dashes(s.dashes)} d="M{path(s.x, s.y)}"/>{dots}</g>'
        )
    words = "".join(
        f'<text x="{LEFT + across(x):.1f}" y="{HEIGHT - 27}" text-anchor="middle">{_short(x)}</text>'
        for x in ticks
    )
    words += "".join(
        f'<text x="{LEFT - 6}" y="{TOP + down(y) + 4:.1f}" text-anchor="end">{y:.6g}</text>' for y in levels
    )
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(_said(chart))}">{words}'
        f'<text x="0" y="13">{escape(chart.y_label)}</text>'
        f'<text x="{LEFT + ACROSS / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f'<svg x="{LEFT}" y="{TOP}" width="{ACROSS}" height="{DOWN}">{inside}</svg>'
        f'<path class="mark" d="M0 {TOP}v{DOWN}"/></svg>'
    )
    values = _values(
        chart.title,
        [chart.x_label, *(s.label for s in chart.series)],
        [s.style for s in chart.series],
        [(LEFT + across(x), [f"{x:,.0f}", *(_at(s, x) for s in chart.series)]) for x in found],
    )
    return _figure(chart.title, svg, "x", values)


def _ticks(low: float, high: float) -> list[float]:
    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [0.0 + float(x) for x in found if low <= x <= high]


def _short(x: float) -> str:
    return str(EngFormatter(sep="")(x))


def _at(one: Series, x: float) -> str:
    if x not in one.x:
        return NONE
    i = one.x.index(x)
    return f"{one.y[i]:.3f}" + (f" ± {one.half[i]:.3f}" if one.half else "")


def _said(chart: Chart) -> str:
    """A chart in words: where each curve ends."""
    ends = "; ".join(f"{s.label} {s.y[-1]:.3f} at {_short(s.x[-1])}" for s in chart.series)
    return f"{chart.title}: {chart.y_label} over {chart.x_label}. Curves end at: {ends}."


def _values(
    name: str, headers: Sequence[str], styles: Sequence[int], rows: Iterable[tuple[float, Sequence[str]]]
) -> str:
    """The table behind a figure; each row has the place in the figure that it belongs to.

    Args:
        name: of the figure.
        headers: of the columns.
        styles: of the curves that the columns after the first are for; empty: they are no curves.
        rows: place and cells.
    """
    marks = ["", *(f' data-k="{style}"' for style in styles)] if styles else [""] * len(headers)
    head = "".join(f'<th scope="col"{mark}>{escape(h)}</th>' for h, mark in zip(headers, marks, strict=True))
    body = "".join(
        f'<tr data-at="{at:.1f}"><th scope="row">{escape(first)}</th>'
        f"{''.join(f'<td>{escape(cell)}</td>' for cell in others)}</tr>\n"
        for at, (first, *others) in rows
    )
    html = (
        f'<table aria-label="{escape(name)}"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
    )
    return folded("Values", _box(html, f"values: {name}"), "values")


def _figure(title: str, svg: str, along: str, values: str) -> str:
    """A picture and its values; ``along`` says on which axis the rows of those lie."""
    return (
        f'<div class="chart"><h3>{escape(title)}</h3>\n'
        f'<div class="plot" data-along="{along}">{svg}</div>\n{values}</div>\n'
    )


# ---- maps ----------------------------------------------------------------------------------------

CELL = 12


def maps(panels: Sequence[Map], caption: str) -> str:
    """A figure of maps on one scale of colours, folded by their parts."""
    first = panels[0]
    steps = ", ".join(_hex(first.color(first.top * (i / 8) ** 2)) for i in range(9))
    marks = "".join(f"<span>{digits(first.top * (i / 4) ** 2)}</span>" for i in range(5))
    folds = ""
    for part in dict.fromkeys(one.part for one in panels):
        drawn = "".join(map(_map, (one for one in panels if one.part == part)))
        folds += folded(part, f'<div class="panels row">\n{drawn}</div>\n', "setting", not folds)
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption>\n<div class="scale" aria-hidden="true">'
        f'<div style="background:linear-gradient(90deg,{steps})"></div>{marks}</div>\n{folds}</figure>\n'
    )


def _map(one: Map) -> str:
    return _heat(one) if one.written else _matrix(one)


def _hex(color: tuple[float, float, float]) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in color)


def _heat(one: Map) -> str:
    """A map as a table whose cells are coloured."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in one.columns)
    body = ""
    for name, values in zip(one.rows, one.values, strict=True):
        colors = [one.color(value) for value in values]
        cells = "".join(
            f'<td style="background:{_hex(c)};color:{on(c)}">{digits(v)}</td>'
            for c, v in zip(colors, values, strict=True)
        )
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>\n'
    corner = f"{one.row_label} \\ {one.column_label}"
    return (
        f'<div class="chart"><h3>{escape(one.title)}</h3>\n'
        + _box(
            f'<table class="heat" aria-label="{escape(one.title)}"><thead><tr>'
            f'<th scope="col">{escape(corner)}</th>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>',
            one.title,
        )
        + "</div>\n"
    )


def _matrix(one: Map) -> str:
    """A map as a picture: one path for all cells of a colour."""
    height, width = (CELL * n for n in one.values.shape)
    gutter = 8 + 6.2 * max(map(len, (*one.rows, *one.columns)))
    shades: dict[str, str] = {}
    zero = "".join(
        f"M{CELL * column} {CELL * row}h{CELL}v{CELL}h-{CELL}z" for row, column in np.argwhere(one.zeros)
    )
    for row, column in np.argwhere(one.values > 0):
        # 24 shades are as many as can be told apart.
        share = round(24 * math.sqrt(min(1.0, one.values[row, column] / one.top))) / 24
        color = _hex(one.color(one.top * share**2))
        shades[color] = shades.get(color, "") + f"M{CELL * column} {CELL * row}h{CELL}v{CELL}h-{CELL}z"
    paths = "".join(f'<path fill="{color}" d="{d}"/>' for color, d in sorted(shades.items()))
    words = "".join(
        f'<text x="-5" y="{CELL * i + 9.5}" text-anchor="end">{escape(word)}</text>'
        for i, word in enumerate(one.rows)
    )
    words += "".join(
        f'<text transform="translate({CELL * i + 9.5} {height + 5}) rotate(-90)" text-anchor="end">'
        f"{escape(word)}</text>"
        for i, word in enumerate(one.columns)
    )
    could = one.values.size - (0 if one.hidden is None else int(one.hidden.sum()))
    said = (
        f"{one.title}: {one.row_label} over {one.column_label}; {int(one.zeros.sum())} of {could} weights "
        "are 0."
    )
    view = f"{-gutter:.0f} -1 {width + gutter + 2:.0f} {height + gutter + 1:.0f}"
    svg = (
        f'<svg viewBox="{view}" class="matrix" role="img" '
        f'aria-label="{escape(said)}"><path class="none" d="{zero}"/>{paths}{words}'
        f'<path class="mark" d="M0 0H{width}V{CELL}H0Z"/></svg>'
    )
    rows = []
    for i, (word, values) in enumerate(zip(one.rows, one.values, strict=True)):
        most = [j for j in np.argsort(-values, kind="stable")[:5] if values[j] > 0]
        looked = ", ".join(f"{one.columns[j]} {values[j]:.3f}" for j in most) or NONE
        rows.append((CELL * i, [word, looked, str(int((values > 0).sum()))]))
    headers = [one.row_label, f"{one.column_label} most", "weights > 0"]
    return _figure(one.title, svg, "y", _values(one.title, headers, [], rows))
