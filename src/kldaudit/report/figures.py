"""The page's figures. Arms differ by colour, dash and marker; zero and infinity have a place of their own."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from kldaudit.report.evidence import Evidence, Variant
from kldaudit.report.words import number, percent, quantile_name

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b2478f", "#8a6d00", "#2b2b2b", "#3f9fd0")
"""After Okabe and Ito's palette for colour-blind readers, darkened where it was too light for lines on white."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")

INK, GRID, SHADE = "#1c1f23", "#e4e7ea", "#f3ead2"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Style:
    """How one arm is drawn, in every figure."""

    colour: str
    dash: str
    marker: str


def styles(evidence: Evidence) -> dict[str, Style]:
    """A style for each variant, by its place in the audit; 280 variants have distinct ones."""
    return {
        name: Style(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(evidence.audit.variants)
    }


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis of KL with places for exactly 0 (left or below) and for infinity (right or above).

    ``low`` and ``high`` are whole decades; ``zero`` and ``infinite`` are null where no value needs the place.
    """

    low: int
    high: int
    zero: float | None
    infinite: float | None

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "LogScale":
        """The scale that holds these values, FP64 [n], ≥ 0."""
        ordinary = values[(values > 0) & np.isfinite(values)]
        low, high = (
            (-6, 0) if not len(ordinary) else (_decade(ordinary.min(), math.floor), _decade(ordinary.max(), math.ceil))
        )
        high = max(high, low + 1)
        gap = max(0.6, 0.12 * (high - low))
        zero = 10 ** (low - gap) if (values == 0).any() else None
        return cls(low, high, zero, 10 ** (high + gap) if np.isinf(values).any() else None)

    def place(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where the values are drawn."""
        placed = np.array(values, np.float64)
        placed[values == 0] = self.zero
        placed[np.isinf(values)] = self.infinite
        return placed

    def axis(self) -> dict[str, Any]:
        """Plotly's settings of the axis."""
        step = max(1, math.ceil((self.high - self.low) / 6))
        ticks = {10.0**n: _power(n) for n in range(self.high, self.low - 1, -step)}
        ticks |= {place: name for place, name in ((self.zero, "0"), (self.infinite, "∞")) if place is not None}
        pad = 0.04 * (self.high - self.low) + 0.1
        ends = [self.zero or 10.0**self.low, self.infinite or 10.0**self.high]
        return {
            "type": "log",
            "range": [math.log10(ends[0]) - pad, math.log10(ends[1]) + pad],
            "tickvals": sorted(ticks),
            "ticktext": [ticks[value] for value in sorted(ticks)],
        }

    def lines(self, axis: str) -> list[dict[str, Any]]:
        """The marked lines at 0 and infinity, across the other axis."""
        other = "y" if axis == "x" else "x"
        return [
            {"type": "line", f"{axis}0": place, f"{axis}1": place, f"{other}0": 0, f"{other}1": 1,
             f"{other}ref": "paper", "layer": "below", "line": {"color": "#6b7280", "width": 1, "dash": "dot"}}
            for place in (self.zero, self.infinite) if place is not None
        ]  # fmt: skip


def _decade(value: float, rounding: Any) -> int:
    return int(rounding(math.log10(value)))


def _power(n: int) -> str:
    return f"{10.0**n:g}" if -3 <= n <= 2 else f"10<sup>{str(n).replace('-', '−')}</sup>"


def flip_figure(evidence: Evidence, prompt: str) -> go.Figure:
    """Per cent of greedy tokens flipped in each window of a prompt, a line an arm."""
    figure, style = go.Figure(), styles(evidence)
    most = 5.0
    for variant in evidence.measured:
        windows = [one for one in variant.divergence["windows"] if one["prompt"] == prompt]
        shares = [100 * one["flips"] / one["positions"] for one in windows]
        if not variant.is_chance:
            most = max([most, *shares])
        trace = _trace(variant, style[variant.name], 8)
        figure.add_scatter(
            x=[(one["start"] + one["stop"] - 1) / 2 for one in windows],
            y=shares,
            text=[
                f"tokens {one['start']}–{one['stop'] - 1}: {one['flips']} of {one['positions']} flipped "
                f"({percent(one['flips'], one['positions'])})"
                for one in windows
            ],
            **trace,
        )
    y = {"range": [-0.04 * most, 1.08 * most], "ticksuffix": " %", "zeroline": True, "zerolinecolor": "#9aa1a9"}
    return _laid_out(figure, evidence, prompt, "greedy tokens flipped, % of probes", y, [])


def context_figure(evidence: Evidence, prompt: str) -> go.Figure:
    """KL(reference‖variant) along a prompt, an arm a line of its windows' means over dots, one a stored position."""
    figure, style = go.Figure(), styles(evidence)
    scale = LogScale.of(np.concatenate([np.zeros(0), *(one.columns[prompt]["kl"] for one in evidence.measured)]))
    for variant in evidence.measured:
        positions, kl = variant.columns[prompt]["positions"], variant.columns[prompt]["kl"]
        windows = [one for one in variant.divergence["windows"] if one["prompt"] == prompt]
        means = np.array([float(one["mean"]) for one in windows])
        trace = _trace(variant, style[variant.name], 8)
        figure.add_scatter(
            x=positions.tolist(),
            y=scale.place(kl).tolist(),
            text=[f"position {i}: {number(value)} nats" for i, value in zip(positions.tolist(), kl, strict=True)],
            **{**trace, "mode": "markers", "marker": {**trace["marker"], "size": 4.5, "line": {"width": 1}}},
            opacity=0.5,
        )
        figure.add_scatter(
            x=[(one["start"] + one["stop"] - 1) / 2 for one in windows],
            y=scale.place(means).tolist(),
            text=[
                f"tokens {one['start']}–{one['stop'] - 1}: mean {number(mean)} nats"
                for one, mean in zip(windows, means, strict=True)
            ],
            **trace,
        )
    return _laid_out(figure, evidence, prompt, "KL(reference‖variant), nats", scale.axis(), scale.lines("y"), 380)


def _trace(variant: Variant, style: Style, size: int) -> dict[str, Any]:
    name = f"{variant.name} (NOT THE MODEL)" if variant.is_chance else variant.name
    return {
        "mode": "lines+markers",
        "name": name,
        "meta": variant.name,
        "visible": "legendonly" if variant.is_chance else True,
        "line": {"color": style.colour, "dash": style.dash, "width": 1.8},
        "marker": {"symbol": f"{style.marker}-open", "size": size, "line": {"width": 1.4}, "color": style.colour},
        "cliponaxis": False,
        "hovertemplate": "%{text}<extra>%{fullData.name}</extra>",
    }


def _laid_out(
    figure: go.Figure, evidence: Evidence, prompt: str, y_title: str, y: dict[str, Any],
    shapes: list[dict[str, Any]], height: int = 320,
) -> go.Figure:  # fmt: skip
    record = evidence.prompts[prompt]
    calls = [
        {"type": "rect", "x0": span["start"] - 1, "x1": span["end"] - 1, "y0": 0, "y1": 1, "yref": "paper",
         "layer": "below", "line": {"width": 0}, "fillcolor": SHADE}
        for span in record["spans"] if span["kind"] == "tool_call"
    ]  # fmt: skip
    figure.update_layout(_layout(height), shapes=calls + shapes, annotations=[_heading(y_title)])
    figure.update_xaxes(
        _axis(),
        title={"text": "token position", "standoff": 6, "font": {"size": 12.5}},
        range=[0, record["n_tokens"]],
        nticks=9,
        tickformat="d",
    )
    figure.update_yaxes(_axis(), **y)
    return figure


def distribution_figure(evidence: Evidence) -> go.Figure:
    """KL at all positions, a strip an arm, with the quantiles and the mean of the record.

    What is not the model's output is left out: beside the others it would look like a figure.
    """
    figure, style = go.Figure(), styles(evidence)
    arms = [one for one in evidence.measured if not one.is_chance]
    scale = LogScale.of(np.concatenate([np.zeros(0), *(one.kl() for one in arms)]))
    notes = [_heading("KL(reference‖variant), nats")]
    for row, variant in enumerate(arms):
        _add_strip(figure, variant, style[variant.name], scale, -row)
        notes += _strip_notes(variant, -row)
    figure.update_layout(_layout(96 + 62 * len(arms)), shapes=scale.lines("x"), annotations=notes)
    figure.update_xaxes(_axis(), **scale.axis())
    figure.update_yaxes(_axis(), range=[0.45 - len(arms), 0.62], showticklabels=False, showgrid=False, ticks="")
    return figure


def _add_strip(figure: go.Figure, variant: Variant, style: Style, scale: LogScale, row: int) -> None:
    kl = variant.kl()
    where = [
        f"{prompt}, position {position}"
        for prompt, columns in variant.columns.items()
        for position in columns["positions"].tolist()
    ]
    jitter = (np.arange(1, len(kl) + 1) * GOLDEN) % 1 - 0.5
    figure.add_scatter(
        x=scale.place(kl).tolist(),
        y=(row - 0.12 + 0.34 * jitter).round(4).tolist(),
        mode="markers",
        name=variant.name,
        text=[f"{place}: {number(value)} nats" for place, value in zip(where, kl, strict=True)],
        marker={"symbol": style.marker, "size": 5, "color": style.colour, "opacity": 0.4},
        hovertemplate="%{text}<extra>%{fullData.name}</extra>",
    )
    overall = variant.divergence["overall"]
    marks = [(quantile_name(one["q"]), one["value"]) for one in overall["quantiles"] if one["q"] in (0.5, 0.9, 0.99)]
    found = [(name, float(value)) for name, value in marks if value not in (None, "NaN")]
    placed = scale.place(np.array([value for _, value in found] + [variant.mean]))
    figure.add_scatter(
        x=placed.tolist(),
        y=[row - 0.12] * len(placed),
        mode="markers",
        name=variant.name,
        text=[f"{name}: {number(value)} nats" for name, value in [*found, ("mean", variant.mean)]],
        marker={
            "symbol": ["line-ns"] * len(found) + ["diamond"],
            "size": [13] * len(found) + [9],
            "color": INK,
            "line": {"width": [2.2] * len(found) + [1], "color": [INK] * len(found) + ["#ffffff"]},
        },
        hovertemplate="%{text}<extra>%{fullData.name}</extra>",
    )


def _strip_notes(variant: Variant, row: int) -> list[dict[str, Any]]:
    kl = variant.kl()
    parts = [
        f"{n} of {len(kl)} {word}"
        for n, word in ((int((kl == 0).sum()), "exactly 0"), (int(np.isinf(kl).sum()), "infinite"))
        if n
    ]
    name = f"<b>{variant.name}</b>"
    base = {"xref": "paper", "y": row + 0.17, "yanchor": "bottom", "showarrow": False, "bgcolor": "#ffffff"}
    return [
        {**base, "x": 0, "xanchor": "left", "text": name, "font": {"size": 12.5}},
        {**base, "x": 1, "xanchor": "right", "text": ", ".join(parts), "font": {"size": 11.5, "color": "#4b5563"}},
    ][: 2 if parts else 1]


def _heading(text: str) -> dict[str, Any]:
    """The y axis' title, set level above the axis: it reads better, and a phone has no width to give away."""
    return {
        "text": text, "xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom",
        "yshift": 6, "showarrow": False, "font": {"size": 12.5, "color": "#4b5563"},
    }  # fmt: skip


def _layout(height: int) -> dict[str, Any]:
    return {
        "template": go.layout.Template(),
        "height": height,
        "margin": {"l": 46, "r": 14, "t": 34, "b": 44},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "font": {"family": FONT, "size": 12.5, "color": INK},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": "#9aa1a9", "font": {"color": INK, "size": 12.5}},
    }


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": GRID,
        "linecolor": "#9aa1a9",
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#9aa1a9",
        "automargin": True,
    }
