"""Where the browser side lives in the page: one empty host, and the tags that load its scripts.

No value of a run ever passes through a template of Gradio: gr.HTML evaluates what it is given as a
JavaScript template, so a model that writes `${...}` would run as code.
"""

from __future__ import annotations

import gradio as gr

ROOT_ID = "specviz-root"


def create_host() -> gr.HTML:
    """The one host of everything that moves; specviz.js fills it."""
    return gr.HTML(
        f'<div id="{ROOT_ID}"></div><noscript>The panels need JavaScript.</noscript>',
        elem_id="specviz-host", js_on_load=None, apply_default_css=False,
    )  # fmt: skip


def head(plotly_digest: str) -> str:
    """Tags for the page's head. All addresses are relative: the page may live below a proxy's path."""
    return "\n".join(
        (
            '<link rel="stylesheet" href="specviz/static/specviz.css">',
            '<link rel="stylesheet" href="specviz/static/controls.css">',
            f'<script defer src="specviz/plotly.min.js?v={plotly_digest}"></script>',
            '<script type="module" src="specviz/static/specviz.js"></script>',
            '<script type="module" src="specviz/static/bridge.js"></script>',
        )
    )
