"""The page, made with Gradio. No other part of the program imports Gradio."""

from specviz.ui.layout import build, launch_kwargs

__all__ = ["build", "launch_kwargs"]
