"""Rules for the files of the page that can be checked without a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from node import STATIC, javascript, needs_node

SCRIPTS = sorted(STATIC.rglob("*.js"))
STYLES = sorted(STATIC.glob("*.css"))


def code(path: Path) -> str:
    """The file without its comments."""
    text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
    return re.sub(r"(?m)(^|\s)//.*$", "", text)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_never_turn_data_into_markup_or_code(path):
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|scattergl|DOMParser"
    assert not re.findall(forbidden, code(path))


@pytest.mark.parametrize("path", SCRIPTS + STYLES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path):
    text = code(path).replace('"http://www.w3.org/2000/svg"', "")  # a name that is never fetched
    assert not re.findall(r"https?://|@import|url\(", text)


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_heights_do_not_depend_on_the_window(path):
    assert not re.findall(r"\d(vh|svh|dvh|lvh)\b", code(path))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
@needs_node
def test_scripts_are_modules_that_parse(path):
    script = "import { SourceTextModule } from 'node:vm'; import { readFileSync } from 'node:fs';"
    script += "new SourceTextModule(readFileSync(process.argv[2], 'utf-8'));"
    javascript(script, path, flags=("--experimental-vm-modules", "--no-warnings"))


def colours(dark: bool) -> dict[str, str]:
    """Custom properties of a theme; the dark one overrides some of the light one's."""
    text = (STATIC / "specviz.css").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for selector in (r"\.sv", r"\.dark \.sv")[: 1 + dark]:
        block = re.search(rf"(?m)^{selector} {{(.*?)^}}", text, flags=re.S)
        assert block
        found |= dict(re.findall(r"--sv-([\w-]+): (#[0-9a-f]{6});", block[1]))
    return found


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_formula():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read(dark):
    theme = colours(dark)
    grounds = [
        "panel",
        "faint",
        *(f"tint-{state}" for state in ("accepted", "corrected", "bonus", "rejected", "plain")),
    ]
    for ground in grounds:
        assert contrast(theme["ink"], theme[ground]) >= 7, ground
    for ground in ("panel", "faint"):
        assert contrast(theme["muted"], theme[ground]) >= 4.5, ground
    assert contrast(theme["knob"], theme["panel"]) >= 4.5


def test_both_themes_define_the_same_colours():
    text = (STATIC / "specviz.css").read_text(encoding="utf-8")
    dark = re.search(r"(?m)^\.dark \.sv {(.*?)^}", text, flags=re.S)
    assert dark
    assert set(re.findall(r"--sv-[\w-]+(?=: #)", dark[1])) == {f"--sv-{name}" for name in colours(dark=False)}


def test_colours_that_scripts_ask_for_exist():
    names = re.search(r"const NAMES = (\[.*?\]);", (STATIC / "theme.js").read_text(encoding="utf-8"), flags=re.S)
    assert names
    assert set(json.loads(re.sub(r",\s*]", "]", names[1]))) <= set(colours(dark=False))


def test_one_live_region_for_milestones():
    regions = [path.name for path in SCRIPTS for _ in re.findall(r'"aria-live": "(polite|assertive)"', code(path))]
    assert regions == ["stage.js"]
