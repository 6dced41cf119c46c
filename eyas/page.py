"""HTML pages that need no other file: a template with the stylesheet in it (`{{ house }}`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

STYLESHEET = Path(__file__).with_name("house.css")


def stylesheet() -> str:
    """The stylesheet's text."""
    return STYLESHEET.read_text(encoding="utf-8").strip()


def fill(
    template: Path, filters: Mapping[str, Callable[..., str]] | None = None, **values: Any
) -> str:
    """The template with the values in it, escaped. A missing value is an error."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(filters or {})
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        house=Markup(stylesheet()), **values
    )
