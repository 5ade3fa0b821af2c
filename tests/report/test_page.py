"""The page: valid, self-contained, escaped and small. Charts, tables and formatted numbers."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from traces import write_run

from ace_plugins import AceError
from ace_plugins.report.charts import (
    GAP,
    LETTER,
    WIDTH,
    Scale,
    Series,
    draw_heat_map,
    draw_lines,
    draw_ticks,
    fit_scale,
    shorten_names,
    spread_labels,
    thin,
)
from ace_plugins.report.page import describe_run, render_report, write_report
from ace_plugins.report.tables import average_spans, build_site_table, format_duration, format_number
from ace_plugins.report.trace import read_run
from ace_plugins.report.verdicts import RunOutcome, SiteOutcome, judge_saved

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checked(HTMLParser):
    """Every tag that is opened is closed, in order; and what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch("[a-z-]+", name) for name in names), names
        self.outside += [f"{tag} {name}" for name in names if name in ("src", "href", "xlink:href", "srcset", "data")]
        self.outside += [f"{tag} {name}" for name in names if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def checked(text: str) -> Checked:
    page = Checked(text)
    assert page.outside == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|//\w|url\(|@import", text)
    return page


def test_the_parser_of_these_tests_notices_what_is_wrong() -> None:
    for wrong in ("<p><b></p></b>", "<p>", "</p>"):
        with pytest.raises(AssertionError):
            Checked(wrong)
    with pytest.raises(AssertionError):
        checked('<img src="x.png">')


def test_a_page_has_all_that_was_asked_for(tmp_path: Path) -> None:
    about = {"versions": {"torch": "2.13.0", "ace-plugins": "0.1"}, "upstream": "EGNO at abc1234", "seed": 7}
    folder = write_run(tmp_path / "a", sites=3, lines=100, origins={"rho": "--rho"}, **about)
    text = render_report([read_run(folder)])
    page = checked(text)
    assert '<meta name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for told in (
        "egno, resilient",
        "main.py --epochs 60 --name 'a b'",
        "rho = 2x (--rho)",
        "torch 2.13.0, ace-plugins 0.1",
        "EGNO at abc1234",
        "seed 7",
        "training loss",
        "learning rate",
        "relative, under SE(3)",
        "the branch stays in the model",
    ):
        assert told in page.words, told
    assert page.tags.count("figure") == 7
    assert text.count('class="word kept"') == 4, "in every row of the table, and once with what it means"
    assert text.count('<text class="c1"') == 5, "four charts of the second layer, one of the learning rate"


def test_nothing_that_is_read_becomes_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\"'&"
    folder = write_run(
        tmp_path / "a",
        sites=2,
        names=[bad, "b" + bad],
        adapter=bad,
        command=[bad],
        versions={bad: bad},
        upstream=bad,
    )
    told = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    told[3] |= {"event": bad, "error": {"relative": 0.1, "group": bad}}
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    run = read_run(folder)
    page = checked(render_report([run, run]))
    assert page.words.count("<script>alert(1)") > 8
    many = write_run(tmp_path / "b", sites=12, names=[f"{n}{bad}" for n in range(12)])
    checked(render_report([read_run(many)]))


def test_many_layers_are_maps_and_few_are_lines(tmp_path: Path) -> None:
    few = render_report([read_run(write_run(tmp_path / "a", sites=8))])
    many = render_report([read_run(write_run(tmp_path / "b", sites=9))])
    assert few.count('<g class="heat" transform') == 0
    assert many.count('<g class="heat" transform') == 4
    shades = ["z", "x", *(f"{sign}{level}" for sign in "pn" for level in range(1, 9))]
    assert all(f".heat .{shade}" in many for shade in shades), "every shade has a colour"
    checked(many)


@pytest.mark.parametrize(("sites", "lines", "megabytes"), [(14, 5000, 2), (8, 5000, 2), (100, 2000, 5)])
def test_long_runs_give_small_pages_soon(tmp_path: Path, sites: int, lines: int, megabytes: float) -> None:
    folder = write_run(tmp_path / "a", sites=sites, lines=lines, errors=500, noise=1.0)
    began = time.process_time()
    text = render_report([read_run(folder)])
    assert time.process_time() - began < 5
    assert len(text.encode()) < megabytes * 2**20
    checked(text)


@pytest.mark.parametrize("mode", ["strict", "bounded", "resilient", "scheduled"])
@pytest.mark.parametrize("finished", [True, False])
def test_every_mode_finished_or_not(tmp_path: Path, mode: str, finished: bool) -> None:
    page = checked(render_report([read_run(write_run(tmp_path / "a", mode=mode, finished=finished))]))
    assert f"egno, {mode}" in page.words
    assert ("the trace has no end" in page.words) is not finished


def test_u_that_never_moves_is_a_sentence_and_no_chart(tmp_path: Path) -> None:
    page = checked(render_report([read_run(write_run(tmp_path / "a", mode="strict"))]))
    assert "0 throughout." in page.words


def test_a_run_of_one_line_and_one_of_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lines=1)
    first = (folder / "trace.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "trace.jsonl").write_text(first)
    assert "killed after step 1" in checked(render_report([read_run(folder)])).words
    (folder / "trace.jsonl").write_text("")
    assert "trace.jsonl has no lines" in checked(render_report([read_run(folder)])).words


def test_runs_side_by_side_say_what_differs(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a", mode="resilient"), write_run(tmp_path / "b", mode="strict", finished=False)
    page = checked(render_report([read_run(one), read_run(two)]))
    assert "2 runs side by side" in page.words
    assert "mode resilient strict" in page.words
    assert "rho 2x" not in page.words, "what they share is not in the table"
    assert "600 600, not finished" in page.words


def test_the_data_are_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", sites=2, lines=2500)
    with (folder / "trace.jsonl").open("a") as file:
        file.write('{"step": 25010, "gamma": [null, 1], "lambda": [0, 0], "u": [0, 0], "finished": true}\n')
    told = json.loads(json.dumps(describe_run(read_run(folder)), allow_nan=False))
    assert told["steps"] == 25010
    assert [site["gamma"] for site in told["sites"]] == [None, 1]
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"seed": math.nan}))
    (folder / "trace.jsonl").write_text(
        '{"step": 3, "seconds": Infinity, "gamma": [NaN, 1], "lambda": [0, 0], "u": [0, 0]}'
    )
    told = json.loads(json.dumps(describe_run(read_run(folder)), allow_nan=False))
    assert (told["about"]["seed"], told["sites"][0]["gamma"]) == (None, None)


def test_a_report_is_written_beside_its_run_or_where_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = write_run(tmp_path / "runs" / "a"), write_run(tmp_path / "b", mode="strict")
    monkeypatch.setenv("ACE_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    assert write_report() == write_report(tmp_path / "runs") == one / "report.html"
    assert write_report(one, str(two)) == Path("ace-report.html")
    assert "2 runs side by side" in Path("ace-report.html").read_text(encoding="utf-8")
    assert write_report(one, out="mine.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(AceError, match="nowhere"):
        write_report("nowhere")


def test_the_table_of_sites_has_the_columns_that_say_something(tmp_path: Path) -> None:
    site = SiteOutcome("layers.0", -0.5, float("nan"), 0.25, "breaks")
    table = build_site_table(RunOutcome("resilient", [site]))
    assert list(table.headers) == ["site", "gamma", "lambda", "u", "verdict"]
    assert table.rows == [("layers.0", "−0.5", "not finite", "0.25", "breaks")]
    table = build_site_table(RunOutcome("strict", [SiteOutcome("layers.0", 0.0, 1.5, 0.0)]))
    assert str(table) == "site      gamma  lambda\nlayers.0      0     1.5"
    run = read_run(write_run(tmp_path / "a", sites=1))
    assert build_site_table(judge_saved(run), run).headers[2] == "over time"


def test_thinning_keeps_peaks_ends_and_gaps() -> None:
    points = [(float(n), 0.0) for n in range(10_000)]
    points[4321] = (4321.0, 9.0)
    (kept,) = thin(points)
    assert len(kept) < 500
    assert (4321.0, 9.0) in kept
    assert (kept[0][0], kept[-1][0]) == (0.0, 9999.0)
    points[5000] = (5000.0, float("nan"))
    assert [piece[0][0] for piece in thin(points)] == [0.0, 5001.0]


def test_labels_do_not_touch_and_stay_inside() -> None:
    placed = spread_labels([100.0, 101.0, 99.0, 10.0, 200.0], 5, 205)
    assert sorted(placed)[0] == 10
    assert placed[2] < placed[0] < placed[1], "in the order of their lines"
    gaps = [b - a for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False)]
    assert min(gaps) >= GAP - 1e-9
    crowded = spread_labels([200.0] * 8, 5, 205)
    assert max(crowded) <= 205
    assert min(b - a for a, b in zip(sorted(crowded), sorted(crowded)[1:], strict=False)) >= GAP - 1e-9


@pytest.mark.parametrize("last", [7, 960, 50_000, 1_000_000])
@pytest.mark.parametrize("left", [46.0, 150.0])
def test_numbers_below_a_chart_do_not_touch(last: int, left: float) -> None:
    drawn = draw_ticks(Scale(0, last, left, WIDTH - 8), 0, "step")
    found = [(float(x), told) for x, told in re.findall(r'x="([\d.]+)" y="0.0">([^<]+)<', drawn)]
    assert len(found) >= 2
    assert found[-1][1].endswith(" steps")
    ends = [x + LETTER * len(told) for x, told in found]
    assert ends[-1] <= WIDTH + 0.1
    assert all(end < x for end, (x, _) in zip(ends, found[1:], strict=False))


def test_scales_have_round_numbers() -> None:
    assert Scale(0, 1, 0, 100).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert Scale(0, 960, 0, 100).ticks(4) == [0, 500]
    assert Scale(0.03, 2.5, 0, 1, log=True).ticks() == [0.05, 0.1, 0.2, 0.5, 1, 2]
    assert Scale(1e-8, 1, 0, 1, log=True)(1e-4) == pytest.approx(0.5)
    assert fit_scale([0.0, 2.0], 0, 1, zero=True).low == 0
    assert fit_scale([float("nan")], 0, 1).ticks()


def test_an_axis_is_logarithmic_only_where_it_can_be() -> None:
    def falling(end: float) -> str:
        return draw_lines("t", [Series("a", [(0.0, 100.0), (1.0, 10.0), (2.0, end)])])

    assert ">10</text>" in falling(1.0)
    assert ">50</text>" in falling(-1.0)


def test_words_for_numbers() -> None:
    assert [format_number(v) for v in (0.0, -0.5, 1234567.0, 1e-7, float("nan"), 12.3456)] == [
        "0",
        "−0.5",
        "1.235e6",
        "1e-7".replace("-", "−"),
        "not finite",
        "12.35",
    ]
    assert [format_duration(s) for s in (42, 400, 9000)] == ["42 s", "7 min", "2.5 h"]
    assert shorten_names(["interactions.10.message"]) == ["…ctions.10.message"]


def test_shortened_names_stay_distinct() -> None:
    segnn = [f"layers.{layer}.{part}" for layer in range(4) for part in ("update_layer_1", "update_layer_2")]
    shown = shorten_names(segnn, 16)
    assert shown[0] == "0.update_layer_1"
    assert len({*shown}) == 8
    assert max(map(len, shown)) == 16
    long = [f"{part}.with_a_long_and_common_end" for part in "ab"]
    assert shorten_names(long, 16) == ["1: …d_common_end", "2: …d_common_end"]
    page = draw_heat_map("gamma", segnn, [1, 2], [[0.1, 0.2]] * 8)
    assert all(f">{name}<" in page for name in shown)


def test_observers_wait_for_no_heavy_library() -> None:
    code = (
        "import sys, ace_plugins.report.observers, ace_plugins.report.record\n"
        "print(*{'torch', 'jinja2', 'rich', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


def test_maps_distinguish_signs_and_show_what_is_not_finite() -> None:
    nan = float("nan")
    drawn = draw_heat_map("t", ["a", "b", "c"], [1, 2, 3], [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0], [0.0, nan, 0.0]])
    for shade in ("p8", "n8", "z", "x"):
        assert f'<path class="{shade}"' in drawn
    assert '<path class="p8" d="M0 0h120v1' in drawn, "the first row is above 0"
    assert average_spans([1, 10, 20], [1.0, 3.0, 5.0], 4) == [1.0, 3.0, 3.0, 5.0]


def test_a_run_that_goes_on_from_a_checkpoint_begins_where_it_began() -> None:
    steps, values = [5000, 6000, 7000], [1.0, 0.5, -1.0]
    assert average_spans(steps, values, 4) == [1.0, 0.5, 0.5, -1.0]
    assert average_spans([1, 50, 100], values, 4) == [1.0, 0.5, 0.5, -1.0]
    drawn = draw_heat_map("t", ["a", "b"], steps, [values, values])
    assert '<path class="x"' not in drawn, "nothing before it is called not finite"
    assert ">6,000</text>" in drawn
    assert ">1,000</text>" not in drawn
