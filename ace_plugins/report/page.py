"""One HTML file that needs nothing else: no network, no scripts, no fonts. Everything told is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")


def page(title: str, sections: Sequence[str], *, heading: str = "", made: str = "") -> str:
    """A whole page. ``heading`` is left out where one section says it all."""
    style = STYLE.read_text(encoding="utf-8")
    head = f"<h1>{escape(heading)}</h1>" if heading else ""
    foot = f"<footer>{escape(made)}</footer>" if made else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header>{head}</header>\n"
        + "\n".join(sections)
        + f"\n{foot}\n</body>\n</html>\n"
    )


def section(heading: str, under: str, parts: Iterable[str], *, alone: bool = False) -> str:
    kind = ' class="alone"' if alone else ""
    below = f'<p class="under">{escape(under)}</p>' if under else ""
    return f"<section{kind}>\n<h2>{escape(heading)}</h2>\n{below}\n" + "\n".join(filter(None, parts)) + "\n</section>"


def subheading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>" if text else ""


def bullets(items: Sequence[str], kind: str = "") -> str:
    return f"<ul{_class(kind)}>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def facts(told: Sequence[tuple[str, str, str]]) -> str:
    """The figures that people look for first: what it is, the figure, and a remark."""
    boxes = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(figure)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for what, figure, more in told
    )
    return f'<dl class="facts">{boxes}</dl>' if told else ""


def figure(title: str, remark: str, picture: str) -> str:
    """``picture`` is SVG of ours, or a sentence where there is nothing to draw."""
    drawn = picture if picture.startswith("<svg") else paragraph(picture, "under")
    return f"<figure><figcaption>{escape(title)} <small>{escape(remark)}</small></figcaption>{drawn}</figure>"


def charts(figures: Sequence[str]) -> str:
    return '<div class="charts">' + "\n".join(figures) + "</div>" if figures else ""


def word(text: str) -> str:
    """A verdict."""
    return f'<span class="word {escape(text.replace(" ", "-"), quote=True)}">{escape(text)}</span>' if text else ""


def said(words: Mapping[str, tuple[str, str]]) -> str:
    """Verdicts with what each means, and for which layers."""
    items = "".join(
        f"<li>{word(each)}<span>{escape(meaning)} <small>{escape(where)}</small></span></li>"
        for each, (meaning, where) in words.items()
    )
    return f'<ul class="said">{items}</ul>' if items else ""


def about(told: Sequence[tuple[str, str, bool]]) -> str:
    """What it is, what it was, and whether that is code."""
    rows = "".join(
        f"<dt>{escape(what)}</dt><dd>{f'<code>{escape(text)}</code>' if code else escape(text)}</dd>"
        for what, text, code in told
        if text
    )
    return f'<dl class="about">{rows}</dl>' if rows else ""


def two(*parts: str) -> str:
    """Side by side where there is room."""
    return '<div class="two">' + "".join(f"<div>{part}</div>" for part in parts if part) + "</div>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """Cells are HTML of ours: who fills them escapes them. The first of a row is its heading.

    A column whose name begins with a space is left out where there is little room.
    """
    kinds = [
        " ".join([*(["number"] if c in numbers else []), *(["roomy"] if c.startswith(" ") else [])]) for c in columns
    ]
    head = "".join(f"<th{_class(kind)}>{escape(c.strip())}</th>" for c, kind in zip(columns, kinds, strict=True))
    body = []
    for first, *cells in rows:
        rest = "".join(f"<td{_class(kind)}>{cell}</td>" for cell, kind in zip(cells, kinds[1:], strict=True))
        body.append(f'<tr><th scope="row">{first}</th>{rest}</tr>')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
