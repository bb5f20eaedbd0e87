"""axe-core finds nothing serious in the panels, in either theme, wide and narrow, with details and tables open."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe

pytestmark = pytest.mark.e2e


def serious(results) -> list[str]:
    return [
        f"{violation['id']}: {violation['help']}: {[node['target'] for node in violation['nodes'][:3]]}"
        for violation in results.response["violations"]
        if violation["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("theme", ["", "?dark"], ids=["light", "dark"])
def test_no_serious_violation(open_page, theme, width):
    page = open_page("knob", width=width, query=theme)
    page.set_viewport_size({"width": width, "height": 6000})  # plots are drawn when they can be seen
    page.locator(".sv-text .sv-token").nth(20).dispatch_event("click")
    page.wait_for_function("document.querySelectorAll('.sv-plot.js-plotly-plot').length > 0")
    assert serious(Axe().run(page, context=".sv")) == []
    for toggle in page.locator(".sv-panel button", has_text="Table").all():
        toggle.click()
    page.get_by_role("button", name="Hierarchical").click()
    page.get_by_role("button", name="Tour").click()
    page.wait_for_function("document.querySelectorAll('.sv-table table').length > 4")
    assert serious(Axe().run(page, context=".sv")) == []


def test_the_check_can_fail(open_page):
    page = open_page("plain")
    page.evaluate("document.querySelector('.sv-badge').style.cssText = 'color: #999; background: #aaa'")
    assert any("color-contrast" in line for line in serious(Axe().run(page, context=".sv")))
