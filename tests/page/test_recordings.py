"""Runs that are opened from a file, and figures that are saved, in a real browser without any engine."""

from __future__ import annotations

import base64
import gzip
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import unquote

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
OPEN = """async ([name, bytes]) => {
    const data = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
    try { await specviz.open(new File([data], name)); return null; } catch (error) { return error.message; }
}"""
SAVE = """async (format) => {
    const blob = await specviz.picture(format);
    const bytes = new Uint8Array(await blob.arrayBuffer());
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}"""


def open_file(page, name: str, data: bytes) -> str | None:
    """What the page says of the file; None when it plays."""
    return page.evaluate(OPEN, [name, base64.b64encode(data).decode()])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
def test_a_saved_run_plays_again(open_page, packed):
    page = open_page("plain")
    data = (GOLDEN / "eos.ndjson").read_bytes()
    assert (
        open_file(page, "mine.ndjson.gz" if packed else "mine.ndjson", gzip.compress(data) if packed else data) is None
    )
    assert page.inner_text(".sv-badge").lower() == f"recording · mine.ndjson{'.gz' * packed}"
    page.evaluate("() => { const r = specviz.state.replay; r.pause(); r.seek(r.end); }")
    last = data.splitlines()[-1]
    page.wait_for_function(
        "seq => specviz.state.figures?.seq === seq", arg=int(last.split(b'"seq":')[1].split(b",")[0])
    )


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("photo.png", b"\x89PNG\r\n\x1a\n\xff\xfe", "photo.png cannot be read: it is no text"),
        ("cut.ndjson.gz", gzip.compress(b"{}" * 20000, mtime=0)[:40], "cut.ndjson.gz cannot be read: it is cut off"),
        ("notes.ndjson", b"hello\n", "notes.ndjson, line 1 is not JSON"),
        ("empty.ndjson", b"", "empty.ndjson holds no run_start"),
        ("bomb.gz", None, "bomb.gz is larger than 256 MiB"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_clear_line_and_the_page_stays_as_it_was(open_page, name, data, said):
    page = open_page("draft4")
    before = page.evaluate("specviz.state.metrics.seq")
    if data is None:
        data = gzip.compress(b"\0" * (257 << 20), 1)
    message = open_file(page, name, data)
    assert said in message and "\n" not in message
    page.wait_for_function("text => document.querySelector('.sv-notice').textContent === text", arg=message)
    assert page.evaluate("specviz.state.metrics.seq") == before > 0


def test_all_figures_are_saved_as_one_svg_and_one_png(open_page):
    page = open_page("draft4", width=1000)
    data = base64.b64decode(page.evaluate(SAVE, "svg"))
    svg = ElementTree.fromstring(data)
    ns = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in svg.iter(f"{ns}text")]
    assert "stories-moe" in texts[0] and "emulated" in texts[0]
    # What is hidden has no place in a picture, nor has the what-if panel's plot before somebody looked at it.
    shown = page.evaluate(
        """() => [...document.querySelectorAll('.sv-plot, .sv-panel canvas')]
            .filter((node) => node.clientWidth > 0 && !node.matches('.sv-panel-whatif .sv-plot'))
            .map((node) => node.closest('.sv-panel').querySelector('.sv-title > span').textContent)"""
    )
    titles = set(shown)
    assert len(titles) >= 5 and titles <= set(texts)
    images = list(svg.iter(f"{ns}image"))
    assert len(images) == len(shown)
    for image in images:
        kind, content = image.get("href").split(",", 1)
        if kind.startswith("data:image/svg"):
            assert len(list(ElementTree.fromstring(unquote(content)).iter())) > 20, "an empty plot"
        else:
            assert base64.b64decode(content).startswith(b"\x89PNG")
    png = base64.b64decode(page.evaluate(SAVE, "png"))
    size = struct.unpack(">II", png[16:24])
    assert png.startswith(b"\x89PNG") and size == (2 * int(svg.get("width")), 2 * int(svg.get("height")))
    # Not one colour all over: the plots really are in the picture.
    assert len(png) > 60_000
