"""Gradio's colours, matched to those of the panels (static/specviz.css), for both themes."""

from __future__ import annotations

import gradio as gr

INK, MUTED, LINE, PANEL, FAINT, PAGE = "#1b2127", "#57616c", "#dfe3e8", "#ffffff", "#f1f3f5", "#f7f8fa"
DARK_INK, DARK_MUTED, DARK_LINE, DARK_PANEL, DARK_FAINT = "#e8ebee", "#a0abb6", "#2b323a", "#15191e", "#1d2228"
DARK_PAGE = "#0e1115"
ACCENT, ACCENT_STRONG = "#0072b2", "#005a8e"


def create_theme() -> gr.themes.Base:
    """The theme: fonts are plain names of what the system has, so that nothing is fetched."""
    theme = gr.themes.Base(
        neutral_hue="zinc", radius_size="md", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    colours = {
        "body_background_fill": (PAGE, DARK_PAGE),
        "body_text_color": (INK, DARK_INK),
        "body_text_color_subdued": (MUTED, DARK_MUTED),
        "block_background_fill": (PANEL, DARK_PANEL),
        "block_border_color": (LINE, DARK_LINE),
        "block_title_text_color": (INK, DARK_INK),
        "block_label_text_color": (INK, DARK_INK),
        "block_info_text_color": (MUTED, DARK_MUTED),
        "border_color_primary": (LINE, DARK_LINE),
        "background_fill_primary": (PANEL, DARK_PANEL),
        "background_fill_secondary": (FAINT, DARK_FAINT),
        "input_background_fill": (FAINT, DARK_FAINT),
        "input_border_color": (LINE, DARK_LINE),
        "button_primary_background_fill": (ACCENT, ACCENT),
        "button_primary_background_fill_hover": (ACCENT_STRONG, ACCENT_STRONG),
        "button_primary_text_color": ("white", "white"),
        "button_secondary_background_fill": (FAINT, DARK_FAINT),
        "button_secondary_border_color": (LINE, DARK_LINE),
        "button_cancel_background_fill": (FAINT, DARK_FAINT),
        "button_cancel_text_color": (INK, DARK_INK),
        "slider_color": (ACCENT, "#4aa3df"),
        "checkbox_background_color_selected": (ACCENT, ACCENT),
        "checkbox_border_color_selected": (ACCENT, ACCENT),
        "checkbox_label_background_fill": (FAINT, DARK_FAINT),
        "checkbox_label_background_fill_selected": (FAINT, DARK_FAINT),
        "checkbox_label_text_color_selected": (INK, DARK_INK),
    }
    values = {name: light for name, (light, _) in colours.items()}
    return theme.set(**values, **{f"{name}_dark": dark for name, (_, dark) in colours.items()})
