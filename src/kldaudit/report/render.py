"""Fill the template."""

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kldaudit.errors import RecordError
from kldaudit.report import figures, tables
from kldaudit.report.environments import environments
from kldaudit.report.evidence import Evidence, read_evidence

PLOTLY_SETTINGS = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}


def render_report(results: Path) -> str:
    """The report of the audit in a results folder, as one HTML page that needs nothing else.

    Raises:
        RecordError: a record is missing, malformed, or not the one that the disclosure sheet was made from.
    """
    try:
        evidence = read_evidence(results)
        content = page_content(evidence)
    except (KeyError, TypeError) as error:
        raise RecordError(
            "a record lacks what the report shows",
            where=str(results),
            expected="the records that this version of kldaudit writes",
            found=f"{error!r}",
            do="run the audit's steps again with this version",
        ) from error
    environment = Environment(
        loader=PackageLoader("kldaudit.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(content)


def page_content(evidence: Evidence) -> dict[str, Any]:
    """Everything that the template names."""
    return {
        "evidence": evidence,
        "claims": tables.claim_rows(evidence),
        "interval_notes": tables.interval_notes(evidence),
        "noise_floor": tables.noise_floor(evidence),
        "does_not_say": tables.does_not_say(evidence),
        "window_rule": next((one.divergence["window_rule"] for one in evidence.measured), None),
        "windows": {prompt: tables.window_tables(evidence, prompt) for prompt in evidence.prompts},
        "quantiles": tables.quantile_rows(evidence),
        "means": tables.mean_table(evidence),
        "verifications": tables.verification_groups(evidence),
        "dishonoured": tables.dishonoured(evidence),
        "environments": environments(evidence),
        "nine": tables.nine_rows(evidence),
        "groups": tables.shared_groups(evidence),
        "sheets": tables.variant_sheets(evidence),
        "styles": figures.styles(evidence),
        "figures": {name: script_json(figure) for name, figure in all_figures(evidence).items()},
        "plotly_settings": script_json(PLOTLY_SETTINGS),
        "plotly": Markup(get_plotlyjs()),  # noqa: S704 - plotly's own script
    }


def all_figures(evidence: Evidence) -> dict[str, go.Figure]:
    """The figures by the id of their place in the page; none where no variant ran."""
    if not evidence.measured:
        return {}
    found = {}
    for number, prompt in enumerate(evidence.prompts, 1):
        found[f"flips-{number}"] = figures.flip_figure(evidence, prompt)
        found[f"context-{number}"] = figures.context_figure(evidence, prompt)
    if not all(variant.is_chance for variant in evidence.measured):
        found["distribution"] = figures.distribution_figure(evidence)
    return found


def script_json(content: Any) -> Markup:
    """JSON that is safe inside a script element: nothing in it can end the element or begin a comment."""
    text = content.to_json() if isinstance(content, go.Figure) else json.dumps(content, sort_keys=True)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above
