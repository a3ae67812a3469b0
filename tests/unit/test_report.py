"""The report on small records made by hand; the sheet is the real one, made from them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from chain import tie_together
from numpy.typing import NDArray

from kldaudit.audit import parse_audit
from kldaudit.disclosure.sheet import disclose
from kldaudit.divergence.rows import COLUMNS
from kldaudit.divergence.statistics import Chance, Interval, Window, summarise
from kldaudit.divergence.step import Divergence
from kldaudit.errors import RecordError
from kldaudit.records import write_json
from kldaudit.report import render_report
from kldaudit.report.evidence import read_evidence
from kldaudit.report.figures import LogScale
from kldaudit.report.render import all_figures
from kldaudit.report.tables import claim_rows, quantile_rows
from kldaudit.report.words import number, percent
from kldaudit.verify import Comparison, Difference, Verification

EVERY, WINDOW = 4, 40
GRID = (np.arange(40) * 7 % 40 + 1) / 400

Build = Callable[..., Path]


def columns_of(kl: NDArray[np.float64], flips: int) -> dict[str, NDArray[np.float64]]:
    columns = {name: np.zeros(len(kl)) for name in COLUMNS}
    columns["flip"][:flips] = 1
    return columns | {"kl": kl, "kl_reverse": kl}


def divergence_of(
    variant: str, kl: NDArray[np.float64], flips: int, is_chance: bool, prompts: list[str]
) -> tuple[Divergence, dict[str, Any]]:
    parts = {
        name: columns_of(part, flips if i == 0 else 0)
        for i, (name, part) in enumerate(zip(prompts, np.array_split(kl, len(prompts)), strict=True))
    }
    probes = WINDOW // EVERY
    windows = [
        Window(
            prompt=name,
            start=start * EVERY,
            stop=start * EVERY + WINDOW,
            positions=len(columns["kl"][start : start + probes]),
            mean=float(columns["kl"][start : start + probes].mean()),
            flips=int(columns["flip"][start : start + probes].sum()),
        )
        for name, columns in parts.items()
        for start in range(0, len(columns["kl"]), probes)
    ]
    joined = {name: np.concatenate([one[name] for one in parts.values()]) for name in COLUMNS}
    finite = bool(np.isfinite(kl).all())
    interval = Interval(
        level=0.95, low=float(kl.mean()) / 2 if finite else None, high=float(kl.mean()) * 2 if finite else None,
        method="bootstrap", blocks=4, resamples=100, seed=0, caution="only 4 blocks",
    )  # fmt: skip
    record = Divergence(
        reference="reference", variant=variant, outcome="measured", vocab_size=64, every=EVERY,
        logits_dtype={"reference": "bfloat16", "variant": "bfloat16"}, excluded_positions=0, nonfinite_positions=0,
        overall=summarise(joined), interval=interval, prompts={name: summarise(one) for name, one in parts.items()},
        spans={"tool_call": summarise({name: values[:6] for name, values in joined.items()})}, windows=windows,
        window_rule=f"{prompts[0]}: {WINDOW} tokens, {probes} probes",
        noise_floor=summarise(columns_of(np.zeros(len(kl)), 0)),
        chance=Chance(agreement=0.01 if is_chance else 0.9, expected=0.02, is_chance=is_chance),
    )  # fmt: skip
    return record, parts


def verification_of(arm: str, differs: bool, reason: str | None) -> Verification:
    if reason is not None:
        return Verification(arm=arm, outcome="refused", reason=reason, launches=2, passes=0, comparisons=[])
    difference = Difference(
        prompt="agent", positions=20, differing=3 if differs else 0, first_position=11 if differs else None, layers=30,
        first_layer="layers.7.mlp" if differs else None, first_layer_position=7 if differs else None,
        max_ulp=2 if differs else None,
    )  # fmt: skip
    comparison = Comparison(a="launch 1", b="launch 2", identical=not differs, prompts=[difference])
    outcome = "differs" if differs else "identical"
    return Verification(arm=arm, outcome=outcome, launches=2, passes=1, comparisons=[comparison])


def prompt_of(name: str, n_tokens: int) -> dict[str, Any]:
    return {
        "schema_version": "1", "prompt": name, "about": "text", "text_sha256": "0", "n_tokens": n_tokens,
        "spans": [{"kind": "tool_call", "start": 8, "end": 20}, {"kind": "generated", "start": 4, "end": 24}],
    }  # fmt: skip


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A results folder; an arm is its KL at every position, or the reason why the engine refused it."""

    def build(
        arms: dict[str, NDArray[np.float64] | str],
        *,
        flips: int = 0,
        chance: tuple[str, ...] = (),
        differing: tuple[str, ...] = (),
        not_as_asked: tuple[str, ...] = (),
        prompts: tuple[str, ...] = ("agent",),
    ) -> Path:
        results = tmp_path / "results"
        checkpoint = {"source": "./model"}
        described = {name: {"file": "x.txt", "about": "text"} for name in prompts}
        audit = parse_audit(
            {"name": "hand-made", "prompts": described, "checkpoints": {"model": checkpoint},
             "arms": {"reference": {"checkpoint": "model", "reference": True}}
             | {name: {"checkpoint": "model"} for name in arms}},
            where="the test",
        )  # fmt: skip
        audit.write(results / "spec.json")
        lengths = [len(kl) for kl in arms.values() if not isinstance(kl, str)]
        n_tokens = EVERY * max([20, *lengths]) // len(prompts)
        for path in ("image.json", "checkpoints/model.json"):
            write_json(results / path, {"schema_version": "1"})
        for name in prompts:
            write_json(results / "prompts" / f"{name}.json", prompt_of(name, n_tokens))
        for name in ("reference", *arms):
            kl = arms.get(name, GRID)
            reason = kl if isinstance(kl, str) else None
            honoured = name not in not_as_asked
            line = {"setting": "attention_backend", "asked": "FLASH_ATTN", "got": "FLASH_ATTN" if honoured else "CPU",
                    "honoured": honoured, "unsupported": False}  # fmt: skip
            write_json(results / "arms" / f"{name}.json", {"schema_version": "1"})
            write_json(results / "captures" / name / "launch1.manifest.json", {"schema_version": "1", "asked": [line]})
            verification_of(name, name in differing, reason).write(results / "verification" / f"{name}.json")
            if name != "reference":
                write_divergence(results, name, kl, flips, name in chance, list(prompts))
        tie_together(results, "reference")
        disclose(results).write(results / "disclosure.json")
        return results

    return build


def write_divergence(
    results: Path, name: str, kl: NDArray[np.float64] | str, flips: int, is_chance: bool, prompts: list[str]
) -> None:
    parts: dict[str, Any] = {}
    if isinstance(kl, str):
        record = Divergence(reference="reference", variant=name, outcome="refused", reason=kl)
    else:
        record, parts = divergence_of(name, kl, flips, is_chance, prompts)
    record.write(results / "divergence" / f"{name}.json")
    with h5py.File(results / "divergence" / f"{name}.h5", "w") as file:
        file.attrs.update({"reference": "reference", "variant": name})
        for prompt, columns in parts.items():
            columns = columns | {"positions": np.arange(len(columns["kl"])) * EVERY + EVERY - 1}
            for column, values in columns.items():
                file[f"prompts/{prompt}/{column}"] = values


def body(page: str) -> str:
    """The page without its scripts and styles."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)


def test_markup_in_a_record_is_text(build: Build) -> None:
    page = render_report(build({"w8a8": GRID, "w4a16": "<script>alert(1)</script>"}))
    assert "<script>alert" not in page
    assert "refused: &lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_arms_are_ranked_not_the_model_then_worst_then_refused(build: Build) -> None:
    results = build({"a": "no kernel", "b": GRID, "c": GRID * 9, "d": GRID * 2}, chance=("d",))
    assert [(row.arm, row.kind) for row in claim_rows(read_evidence(results))] == [
        ("d", "chance"), ("c", "measured"), ("b", "measured"), ("a", "refused"),
    ]  # fmt: skip


def test_a_chance_arm_is_loud_and_has_no_figure(build: Build) -> None:
    results = build({"broken": GRID * 100, "w8a8": GRID}, chance=("broken",))
    row = claim_rows(read_evidence(results))[0]
    assert row.notice is not None
    assert row.notice.startswith("NOT THE MODEL’S OUTPUT: its greedy tokens agree with the reference’s at 1.00\u00a0%")
    assert row.mean == row.flips == ""
    page = body(render_report(results))
    assert page.count("NOT THE MODEL’S OUTPUT") >= 3
    assert number(100 * GRID.mean()) not in page
    drawn = all_figures(read_evidence(results))
    assert all(trace.visible == "legendonly" for trace in drawn["context-1"].data if trace.meta == "broken")
    assert {trace.name for trace in drawn["distribution"].data} == {"w8a8"}


def test_a_page_holds_nothing_but_a_chance_arm(build: Build) -> None:
    page = body(render_report(build({"broken": GRID}, chance=("broken",))))
    assert 'id="flips-1"' in page
    assert 'id="distribution"' in page
    assert 'class="plot" id="distribution"' not in page


def test_an_arm_with_no_divergence_keeps_the_axes_finite(build: Build) -> None:
    results = build({"chunk": np.zeros(40)})
    evidence = read_evidence(results)
    assert claim_rows(evidence)[0].mean_note == "exactly 0 at all 40 positions"
    for figure in all_figures(evidence).values():
        assert np.isfinite(figure.layout.yaxis.range).all()
        for trace in figure.data:
            assert len(trace.y)
            assert np.isfinite(np.array([trace.x, trace.y], np.float64)).all()
    assert min(all_figures(evidence)["context-1"].data[0].y) > 0


def test_infinite_positions_are_counted_and_drawn(build: Build) -> None:
    kl = GRID.copy()
    kl[:3] = np.inf
    evidence = read_evidence(build({"w8a8": kl}))
    row = claim_rows(evidence)[0]
    assert (row.mean, row.mean_note, row.interval) == ("∞", "infinite at 3 of 40 positions", "none")
    assert quantile_rows(evidence)[0]["infinite"] == 3
    assert len(all_figures(evidence)["context-1"].data[0].y) == 40


def test_the_scale_has_places_beyond_its_decades_for_zero_and_infinity() -> None:
    scale = LogScale.of(np.array([0.0, 2e-5, 0.3, np.inf]))
    assert (scale.low, scale.high) == (-5, 0)
    assert scale.zero is not None
    assert scale.zero < 1e-5
    assert scale.infinite is not None
    assert scale.infinite > 1
    assert scale.place(np.array([0.0, 0.3, np.inf])).tolist() == [scale.zero, 0.3, scale.infinite]
    assert LogScale.of(np.array([0.2])).zero is None


def test_an_arm_whose_bits_differ_is_not_verified(build: Build) -> None:
    results = build({"w8a8": GRID}, differing=("w8a8",))
    mark = claim_rows(read_evidence(results))[0].verified
    assert mark is not None
    assert (mark.yes, mark.text) == (False, "1 of 1 comparisons differ, 2 launches × 1 pass")
    page = body(render_report(results))
    assert "3 of 20 positions differ" in page
    assert "layers.7.mlp" in page


def test_a_reference_whose_bits_differ_verifies_nobody(build: Build) -> None:
    mark = claim_rows(read_evidence(build({"w8a8": GRID}, differing=("reference",))))[0].verified
    assert mark is not None
    assert not mark.yes
    assert "the reference: 1 of 1 comparisons differ" in mark.text


def test_what_did_not_run_as_asked_is_said(build: Build) -> None:
    results = build({"w8a8": GRID}, not_as_asked=("w8a8",))
    mark = claim_rows(read_evidence(results))[0].as_asked
    assert mark is not None
    assert (mark.yes, mark.text) == (False, "attention_backend: asked FLASH_ATTN, ran CPU")


def test_the_nine_are_all_there_even_if_nothing_is_known(build: Build) -> None:
    page = body(render_report(build({"w8a8": GRID})))
    table = page[page.index("The nine without which") : page.index("The same for every variant")]
    assert len(re.findall(r'<th scope="row"', table)) == 9
    assert "NOT DISCLOSED" in table


@pytest.mark.parametrize("arms", [{"w4a16": "no kernel"}, {f"arm-{i}": GRID * (i + 1) for i in range(12)}])
def test_a_page_holds_no_variant_that_ran_or_twelve(build: Build, arms: dict[str, Any]) -> None:
    page = body(render_report(build(arms)))
    assert all(f"<code>{name}</code>" in page for name in arms)


def test_the_same_records_give_the_same_bytes(build: Build) -> None:
    results = build({"w8a8": GRID, "w4a16": "no kernel"}, prompts=("agent", "words"))
    assert render_report(results) == render_report(results)


def test_a_page_needs_nothing_else(build: Build) -> None:
    page = render_report(build({"w8a8": GRID}))
    assert not re.search(r"""\b(?:src|href)\s*=\s*(?!["']?#)""", body(page))
    assert "default-src 'none'" in page


def test_a_missing_sheet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"disclosure\.json"):
        render_report(tmp_path)


def test_a_sheet_of_other_records_is_an_error(build: Build) -> None:
    results = build({"w8a8": GRID})
    path = results / "verification" / "w8a8.json"
    write_json(path, json.loads(path.read_text()) | {"launches": 3})
    with pytest.raises(RecordError, match="the disclosure sheet was not made from this"):
        render_report(results)


def test_a_malformed_sheet_is_an_error(build: Build) -> None:
    results = build({"w8a8": GRID})
    sheet = json.loads((results / "disclosure.json").read_text())
    write_json(results / "disclosure.json", {key: value for key, value in sheet.items() if key != "shared"})
    with pytest.raises(RecordError, match="lacks what the report shows"):
        render_report(results)


def test_positions_of_another_variant_are_an_error(build: Build) -> None:
    results = build({"w8a8": GRID, "w4a16": GRID})
    (results / "divergence" / "w8a8.h5").write_bytes((results / "divergence" / "w4a16.h5").read_bytes())
    with pytest.raises(RecordError, match=r"w8a8\.h5 does not belong"):
        render_report(results)


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (0.0616028, "0.0616"), (0.06, "0.0600"), (1.2345e-7, "1.23e-7"), (0.0009996, "0.00100"),
     (0.00099, "9.90e-4"), (12.34, "12.3"), (999.6, "1000"), (123456, "1.23e5"), ("Infinity", "∞"),
     ("NaN", "undefined")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: Any, written: str) -> None:
    assert number(value) == written


@pytest.mark.parametrize(
    ("part", "whole", "written"), [(0, 9, "0 %"), (9, 9, "100 %"), (5, 42, "11.9 %"), (99999, 100000, "> 99.9 %")]
)
def test_shares_are_zero_or_hundred_only_where_they_are(part: int, whole: int, written: str) -> None:
    assert percent(part, whole).replace("\u00a0", " ") == written
