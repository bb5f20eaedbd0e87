"""Plotly figures for stills and exports, from `Metrics.to_json()`: what the page's plots show at that moment."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's palette, which colour-blind people can tell apart.
BLUE, GREEN, ORANGE, VERMILION, GREY = "#0072b2", "#009e73", "#e69f00", "#d55e00", "#6b747d"
MB = 1e6


def acceptance(figures: dict[str, Any]) -> go.Figure:
    """Acceptance by position with n on each bar, and the histogram of tokens a round."""
    part = figures["acceptance"]
    rows, counts = part["by_position"], part["tokens_per_round"]
    figure = make_subplots(cols=2)
    figure.add_bar(
        x=list(range(1, len(rows) + 1)),
        y=[100 * row["rate"] for row in rows],
        text=[f"n {row['verified']}" for row in rows],
        textposition="outside",
        marker_color=BLUE,
        name="accepted",
    )
    figure.add_bar(x=list(range(len(counts))), y=counts, marker_color=GREEN, name="rounds", col=2, row=1)
    figure.update_xaxes(title_text="position in the draft", dtick=1, col=1)
    figure.update_yaxes(title_text="accepted (%)", range=[0, 112], col=1)
    figure.update_xaxes(title_text="tokens a round", dtick=1, col=2)
    figure.update_yaxes(title_text="rounds", col=2)
    return _finish(figure, "Acceptance", figures).update_layout(showlegend=False)


def roofline(figures: dict[str, Any]) -> go.Figure:
    """The amortization roofline: Θ(k) predicted and measured, and the operating points under their two roofs."""
    part, choice = figures["roofline"], figures["governor"]["latest"]
    points, window, link = part["points"], part["window"], part["link_bytes_per_s"]
    figure = make_subplots(cols=2)
    if choice:
        rates = choice["predicted_rate"]
        figure.add_scatter(x=list(range(len(rates))), y=rates, name="predicted Θ(k)", line_color=GREY)
    measured = {"mode": "markers", "marker": {"color": BLUE, "size": 8, "opacity": 0.5}}
    figure.add_scatter(x=[p["k"] for p in points], y=[p["rate"] for p in points], name="measured", **measured)
    waited = [p for p in points if p["intensity"] is not None]
    x = [p["intensity"] * MB for p in waited]
    figure.add_scatter(x=x, y=[p["rate"] for p in waited], name="rounds", **measured, col=2, row=1)
    ends = [min(x, default=1) / 4, max(x, default=1) * 4]
    roofs = [("link roof", [end / MB * link for end in ends] if link else None, VERMILION)]
    roofs.append(("compute roof", [window["compute_roof"]] * 2 if window["compute_roof"] else None, GREEN))
    for name, y, colour in roofs:
        if y:
            figure.add_scatter(x=ends, y=y, mode="lines", name=name, line_color=colour, col=2, row=1)
    figure.update_xaxes(title_text="draft length k (tokens)", dtick=1, col=1)
    figure.update_yaxes(title_text="tokens/s", rangemode="tozero", col=1)
    figure.update_xaxes(title_text="tokens per MB waited for", type="log", col=2)
    figure.update_yaxes(title_text="tokens/s", type="log", col=2)
    return _finish(figure, "Amortization roofline", figures)


def speed(figures: dict[str, Any]) -> go.Figure:
    """Tokens/s over the last second and the whole run, with the knobs that took effect."""
    series = figures["time"]["series"]
    seconds = [point["t"] / 1e9 for point in series]
    figure = go.Figure()
    figure.add_scatter(x=seconds, y=[p["rate"] for p in series], mode="lines", name="last second", line_color=BLUE)
    whole = {"color": GREY, "dash": "dash"}
    figure.add_scatter(x=seconds, y=[p["mean"] for p in series], mode="lines", name="whole run", line=whole)
    for knob in figures["knobs"]:
        label = f"{knob['name']} {knob['old']}→{knob['new']}".replace("<", "&lt;")
        figure.add_vline(x=knob["t"] / 1e9, line={"color": ORANGE, "dash": "dot"}, annotation_text=label)
    figure.update_xaxes(title_text="time (s)")
    figure.update_yaxes(title_text="tokens/s", rangemode="tozero")
    return _finish(figure, "Speed", figures)


def _finish(figure: go.Figure, title: str, figures: dict[str, Any]) -> go.Figure:
    """A still leaves the page: it must say itself what was measured where, and that a link was emulated."""
    facts = figures["facts"]
    if facts:
        link = facts["link"]["label"]
        if facts["link"]["emulated"] and "emulated" not in link.lower():
            link += " (emulated)"
        title = f"{title}<br><sub>{facts['model']['name']} · {facts['machine']['cpu']} · {link}</sub>"
    return figure.update_layout(title=title, template="plotly_white", legend={"orientation": "h", "y": -0.2})
