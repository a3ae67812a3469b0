import json
from math import exp, inf, log, nan, sqrt

import h5py
import jsonschema
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kldaudit import METHOD_VERSION
from kldaudit.audit import DivergenceSettings
from kldaudit.capture_file import Capture, float_values, write_refusal
from kldaudit.divergence.rows import COLUMNS, compare_rows
from kldaudit.divergence.statistics import (
    QUANTILES,
    bootstrap_mean,
    chance_agreement,
    quantiles,
    summarise,
    window_length,
)
from kldaudit.divergence.step import Divergence, compare_prompt, diverge, span_of
from kldaudit.errors import LogitsError, MismatchError, RecordError
from kldaudit.history import PromptRecord, Span

DIVERGENCES = ("kl", "kl_reverse", "js")


def rows(*lines):
    return np.array(lines, np.float64)


def column(name, reference, variant):
    return compare_rows(rows(reference), rows(variant))[name][0]


# Closed forms: P = (3/4, 1/4) and Q = (1/2, 1/2)

P, Q = [log(3), 0.0], [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", 3 / 4 * log(3 / 2) + 1 / 4 * log(1 / 2)),
        ("kl_reverse", 1 / 2 * log(2 / 3) + 1 / 2 * log(2)),
        ("js", (3 / 4 * log(6 / 5) + 1 / 4 * log(2 / 3)) / 2 + (1 / 2 * log(4 / 5) + 1 / 2 * log(4 / 3)) / 2),
        ("entropy_reference", 3 / 4 * log(4 / 3) + 1 / 4 * log(4)),
        ("entropy_variant", log(2)),
        ("delta_p", -1 / 4),
        ("flip", 0),
        ("tie_reference", 0),
        ("tie_variant", 1),
        ("flip_at_tie", 0),
        ("top5_overlap", 1),
        ("top10_overlap", 1),
    ],
)
def test_two_tokens_by_hand(name, expected):
    assert column(name, P, Q) == pytest.approx(expected, rel=1e-14)


def test_there_is_a_value_for_every_column_and_every_row():
    found = compare_rows(rows(P, Q, P), rows(Q, Q, P))
    assert list(found) == list(COLUMNS)
    assert all(values.shape == (3,) and values.dtype == np.float64 for values in found.values())


def test_kl_is_that_of_the_reference_to_the_variant():
    assert column("kl", P, Q) == column("kl_reverse", Q, P)
    assert column("kl", P, Q) != column("kl", Q, P)


def test_kl_of_a_uniform_reference_to_a_sharper_variant_by_hand():
    # Q = (1/2, 1/6, 1/6, 1/6): KL(uniform‖Q) = 1/4 ln(1/2) + 3/4 ln(3/2)
    assert column("kl", [0, 0, 0, 0], [log(3), 0, 0, 0]) == pytest.approx(
        log(1 / 2) / 4 + 3 * log(3 / 2) / 4, rel=1e-14
    )


# Against 60 digits


def probabilities(logits):
    powers = [mpmath.exp(mpmath.mpf(float(one))) if one > -inf else mpmath.mpf(0) for one in logits]
    total = mpmath.fsum(powers)
    return [power / total for power in powers]


def kl_in_60_digits(p, q):
    return mpmath.fsum(a * mpmath.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def pairs():
    random = np.random.default_rng(11)
    plain = random.normal(0, 4, (4, 64))
    narrow = random.normal(0, 1, (4, 64))
    one_hot = np.full((4, 64), -88.0)
    one_hot[:, 3] = 88
    other_hot = one_hot[:, ::-1].copy()
    some_impossible = plain.copy()
    some_impossible[:, 5:20] = -inf
    rounded = plain.astype(np.float32)
    yield "random", plain, random.normal(0, 4, (4, 64))
    for size in (1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8):
        yield f"noise of {size}", plain, plain + random.normal(0, size, plain.shape)
    yield "one FP32 unit in the last place", rounded.astype(float), np.nextafter(rounded, np.float32(99)).astype(float)
    yield "±88", random.choice([-88.0, 88.0], (4, 64)), random.choice([-88.0, 88.0], (4, 64))
    yield "-88 to 88", random.uniform(-88, 88, (4, 64)), random.uniform(-88, 88, (4, 64))
    yield "far from zero", narrow + 1e4, random.normal(0, 1, (4, 64)) - 1e4
    yield "one-hot to random", one_hot, plain
    yield "random to one-hot", plain, one_hot
    yield "one-hot to another", one_hot, other_hot
    yield "all equal to random", np.zeros((4, 64)), plain
    yield "random to all equal", plain, np.full((4, 64), 7.0)
    yield "impossible tokens in the reference", some_impossible, plain
    yield "impossible tokens in both", some_impossible, np.where(np.isneginf(some_impossible), -inf, narrow)


@pytest.mark.parametrize(("reference", "variant"), [pytest.param(a, b, id=name) for name, a, b in pairs()])
def test_divergences_and_entropies_equal_those_in_60_digits(reference, variant):
    """To 1e-12 of the value; a divergence below 1e-7 to 1e-19 nats, the rounding of FP64 log-probabilities."""
    found = compare_rows(reference, variant)
    with mpmath.workdps(60):
        for row in range(len(reference)):
            p, q = probabilities(reference[row]), probabilities(variant[row])
            m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
            expected = {
                "kl": kl_in_60_digits(p, q) if all(b > 0 or a == 0 for a, b in zip(p, q, strict=True)) else inf,
                "kl_reverse": kl_in_60_digits(q, p) if all(a > 0 or b == 0 for a, b in zip(p, q, strict=True)) else inf,
                "js": (kl_in_60_digits(p, m) + kl_in_60_digits(q, m)) / 2,
                "entropy_reference": -mpmath.fsum(a * mpmath.log(a) for a in p if a > 0),
                "entropy_variant": -mpmath.fsum(b * mpmath.log(b) for b in q if b > 0),
            }
            for name, value in expected.items():
                floor = 1e-19 if name in DIVERGENCES else 1e-30
                assert found[name][row] == pytest.approx(float(value), rel=1e-12, abs=floor), (name, row)


@pytest.mark.parametrize("name", ["kl", "kl_reverse"])
def test_kl_of_finite_logits_far_apart_is_finite(name):
    # p of the second token is exp(-720) = 2e-313, above zero; KL = 720 (1 - 2e-313)
    assert column(name, [0, -720], [-720, 0]) == pytest.approx(720, rel=1e-12)


@pytest.mark.parametrize(("reference", "variant"), [([0, 0, -744], [0, 0, -800]), ([0, -745], [0, -inf])])
def test_js_of_a_smallest_probability_is_not_above_its_bound(reference, variant):
    assert column("js", reference, variant) <= log(2)


# Properties

LOGITS = st.floats(-88, 88, allow_subnormal=False)
PAIRS = st.integers(2, 40).flatmap(
    lambda size: st.tuples(*[arrays.arrays(np.float64, (1, size), elements=LOGITS) for _ in range(2)])
)
QUARTERS = arrays.arrays(np.int64, (2, 3, 17), elements=st.integers(-352, 352)).map(lambda found: found / 4)


@given(PAIRS)
@settings(deadline=None)
def test_no_divergence_is_negative(pair):
    found = compare_rows(*pair)
    assert all(found[name][0] >= 0 for name in DIVERGENCES)


@given(PAIRS)
@settings(deadline=None)
def test_js_is_at_most_ln_2_and_the_same_in_both_directions(pair):
    forward, backward = compare_rows(*pair)["js"][0], compare_rows(*pair[::-1])["js"][0]
    assert forward <= log(2) * (1 + 1e-14)
    assert forward == pytest.approx(backward, rel=1e-14)


@given(PAIRS)
@settings(deadline=None)
def test_entropy_is_between_0_and_ln_of_the_vocabulary(pair):
    entropy = compare_rows(*pair)["entropy_reference"][0]
    assert -1e-15 <= entropy <= log(pair[0].shape[1]) * (1 + 1e-14)


@given(PAIRS)
@settings(deadline=None)
def test_equal_bits_have_a_divergence_of_exactly_zero(pair):
    found = compare_rows(pair[0], pair[0].copy())
    assert [found[name][0] for name in (*DIVERGENCES, "delta_p", "flip")] == [0, 0, 0, 0, 0]


@given(QUARTERS, st.integers(-1000, 1000))
@settings(deadline=None)
def test_adding_a_constant_to_the_logits_changes_nothing(pair, constant):
    before, after = compare_rows(*pair), compare_rows(pair[0] + constant, pair[1] - constant)
    for name in COLUMNS:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@given(QUARTERS, st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_divergences_do_not_depend_on_the_order_of_the_tokens(pair, seed):
    order = np.random.default_rng(seed).permutation(17)
    before, after = compare_rows(*pair), compare_rows(*pair[:, :, order])
    for name in (*DIVERGENCES, "entropy_reference", "entropy_variant"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-12, atol=1e-14, err_msg=name)


@given(QUARTERS)
@settings(deadline=None)
def test_a_row_has_the_same_values_in_any_company(pair):
    together = compare_rows(*pair)
    for row in range(3):
        alone = compare_rows(pair[0][row : row + 1], pair[1][row : row + 1])
        for name in COLUMNS:
            assert together[name][row] == pytest.approx(alone[name][0], rel=1e-12, abs=1e-14)


# -inf


def test_a_token_impossible_in_the_reference_contributes_nothing():
    # P = (1/2, 1/2, 0), Q = (1/3, 1/3, 1/3)
    assert column("kl", [0, 0, -inf], [0, 0, 0]) == pytest.approx(log(3 / 2), rel=1e-15)


def test_a_token_impossible_in_the_variant_only_makes_the_kl_infinite():
    assert column("kl", [0, 0, 0], [0, 0, -inf]) == inf


def test_a_token_impossible_in_both_contributes_nothing():
    assert column("kl", [log(3), 0, -inf], [0, 0, -inf]) == pytest.approx(column("kl", P, Q), rel=1e-15)


def test_js_of_distributions_without_a_common_token_is_ln_2():
    assert column("js", [0, -inf], [-inf, 0]) == pytest.approx(log(2), rel=1e-15)


def test_entropy_ignores_impossible_tokens():
    assert column("entropy_reference", [0, 0, -inf], [0, 0, 0]) == pytest.approx(log(2), rel=1e-15)


def test_equal_rows_with_impossible_tokens_have_a_divergence_of_zero():
    row = [1.5, -inf, 0.25, -inf]
    assert [column(name, row, row) for name in DIVERGENCES] == [0, 0, 0]


# Greedy tokens


def test_delta_p_is_that_of_the_references_top_token():
    # P = (1/4, 3/4), Q = (9/10, 1/10): the reference's top token goes from 3/4 to 1/10
    assert column("delta_p", [0, log(3)], [log(9), 0]) == pytest.approx(1 / 10 - 3 / 4, rel=1e-14)


def test_another_greedy_token_is_a_flip():
    assert (column("flip", [2, 1, 0], [1, 2, 0]), column("flip_at_tie", [2, 1, 0], [1, 2, 0])) == (1, 0)


def test_a_tie_goes_to_the_lowest_token_id():
    assert column("flip", [5, 5, 0], [5, 1, 0]) == 0
    assert column("flip", [5, 5, 0], [1, 5, 0]) == 1


@pytest.mark.parametrize(
    ("reference", "variant", "tie_reference", "tie_variant"),
    [
        ([5, 5, 0], [1, 5, 0], 1, 0),  # the reference also has the variant's token as largest
        ([1, 5, 0], [5, 5, 0], 0, 1),  # the variant also has the reference's token as largest
        ([0, 5, 5], [5, 5, 0], 1, 1),
    ],
)
def test_a_flip_between_tied_tokens_is_one_at_a_tie(reference, variant, tie_reference, tie_variant):
    assert column("flip", reference, variant) == 1
    assert column("flip_at_tie", reference, variant) == 1
    assert column("tie_reference", reference, variant) == tie_reference
    assert column("tie_variant", reference, variant) == tie_variant


def test_a_flip_to_a_token_outside_the_tie_is_a_real_one():
    assert column("flip", [5, 5, 0], [0, 0, 5]) == 1
    assert column("flip_at_tie", [5, 5, 0], [0, 0, 5]) == 0


def test_overlaps_by_hand():
    reference = list(range(20, 0, -1))  # top five: 0 1 2 3 4, top ten: 0 … 9
    variant = reference.copy()
    variant[0], variant[15] = variant[15], variant[0]  # token 15 comes in, token 0 drops out
    variant[7], variant[18] = variant[18], variant[7]  # token 18 comes in for 7
    assert column("top5_overlap", reference, variant) == pytest.approx(4 / 5)
    assert column("top10_overlap", reference, variant) == pytest.approx(8 / 10)


def test_overlap_orders_equal_logits_by_token_id():
    assert column("top5_overlap", [1] * 20, [1] * 20) == 1
    assert column("top5_overlap", [1] * 20, [0] * 15 + [1] * 5) == 0


def test_overlap_of_a_small_vocabulary_is_over_all_of_it():
    assert column("top10_overlap", [1, 2, 3], [3, 2, 1]) == 1


# Summaries


def columns_of(kl, **others):
    return {name: np.asarray(others.get(name, np.zeros(len(kl))), np.float64) for name in COLUMNS} | {
        "kl": np.asarray(kl, np.float64)
    }


def test_a_summary_by_hand():
    found = summarise(
        columns_of(
            [1, 2, 6],
            kl_reverse=[1, 1, 4],
            js=[0.5, 0.25, 0],
            delta_p=[0.3, -0.4, 0],
            flip=[1, 0, 1],
            flip_at_tie=[1, 0, 0],
            tie_reference=[1, 1, 0],
            tie_variant=[0, 0, 1],
            entropy_reference=[1, 2, 3],
            entropy_variant=[2, 3, 4],
            top5_overlap=[1, 0.8, 0.6],
            top10_overlap=[1, 1, 0.4],
        )
    )
    assert (found.positions, found.infinite, found.mean, found.minimum, found.maximum) == (3, 0, 3, 1, 6)
    assert (found.mean_reverse, found.mean_js) == (2, 0.25)
    assert found.rms_delta_p == pytest.approx(sqrt((0.09 + 0.16) / 3))
    assert (found.flips, found.flips_at_ties, found.ties_reference, found.ties_variant) == (2, 1, 2, 1)
    assert (found.entropy_reference, found.entropy_variant) == (2, 3)
    assert (found.top5_overlap, found.top10_overlap) == (pytest.approx(0.8), pytest.approx(0.8))


def test_infinite_positions_are_counted_and_make_the_mean_infinite():
    found = summarise(columns_of([0, inf, 1, inf]))
    assert (found.infinite, found.mean, found.minimum, found.maximum) == (2, inf, 0, inf)


@pytest.mark.parametrize("q", QUANTILES)
def test_a_quantile_interpolates_between_order_statistics(q):
    values = np.random.default_rng(3).permutation(10001).astype(float)
    (found,) = quantiles(values, (q,))
    assert found.value == pytest.approx(10000 * q, rel=1e-12)
    assert found.withheld is None


@pytest.mark.parametrize(
    ("positions", "reported"),
    [
        (9, ()),
        (10, (0.5,)),
        (20, (0.5, 0.75)),
        (99, (0.5, 0.75, 0.9)),
        (100, (0.5, 0.75, 0.9, 0.95)),
        (499, (0.5, 0.75, 0.9, 0.95)),
        (500, (0.5, 0.75, 0.9, 0.95, 0.99)),
        (4999, (0.5, 0.75, 0.9, 0.95, 0.99)),
        (5000, (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)),
        (49, (0.5, 0.75)),
        (50, (0.5, 0.75, 0.9)),
    ],
)
def test_a_quantile_with_fewer_than_five_positions_beyond_it_is_withheld(positions, reported):
    found = quantiles(np.arange(float(positions)), QUANTILES)
    assert tuple(one.q for one in found if one.value is not None) == reported
    assert all((one.value is None) == (one.withheld is not None) for one in found)


def test_a_withheld_quantile_says_how_many_positions_lie_beyond_it():
    (found,) = quantiles(np.arange(40.0), (0.95,))
    assert found.withheld == "2.0 positions lie beyond it, at least 5 are needed"


def test_a_low_quantile_is_withheld_like_a_high_one():
    assert [one.value is None for one in quantiles(np.arange(40.0), (0.05, 0.95))] == [True, True]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_quantile_among_infinite_values_is_infinite():
    (found,) = quantiles(np.array([0.0] * 60 + [inf] * 40), (0.75,))
    assert found.value == inf


def test_a_quantile_at_the_last_finite_value_is_that_value():
    (found,) = quantiles(np.array([float(one) for one in range(51)] + [inf] * 50), (0.5,))
    assert found.value == 50


# Windows


@pytest.mark.parametrize(
    ("n_tokens", "every", "expected"),
    [
        (64000, 32, 8000),  # eight windows of 8000
        (1_000_000, 32, 8000),
        (63999, 32, 8000),  # one too few for eight: an eighth is 8000, whole steps
        (8000, 32, 1024),  # an eighth is 1000, up to whole steps
        (8192, 32, 1024),
        (1100, 32, 160),  # 137.5 → 138 → 160
        (31, 32, 32),
        (533, 16, 80),  # 66.6 → 67 → 80
    ],
)
def test_window_length_is_8000_tokens_or_an_eighth_in_whole_steps(n_tokens, every, expected):
    assert window_length(n_tokens, every, DivergenceSettings()) == expected


@given(st.integers(1, 300_000), st.integers(1, 300), st.integers(1, 10_000), st.integers(1, 20))
def test_a_window_is_never_longer_than_window_tokens(n_tokens, every, window_tokens, min_windows):
    chosen = DivergenceSettings(window_tokens=window_tokens, min_windows=min_windows)
    assert 1 <= window_length(n_tokens, every, chosen) <= window_tokens


# Bootstrap

SETTINGS = DivergenceSettings(bootstrap_resamples=500)


def blocks_of(count, size=10, seed=0):
    return list(np.random.default_rng(seed).exponential(1, (count, size)))


def test_the_same_seed_gives_the_same_interval():
    assert bootstrap_mean(blocks_of(25), SETTINGS) == bootstrap_mean(blocks_of(25), SETTINGS)


def test_another_seed_gives_another_interval():
    other = DivergenceSettings(bootstrap_resamples=500, bootstrap_seed=1)
    one, two = bootstrap_mean(blocks_of(25), SETTINGS), bootstrap_mean(blocks_of(25), other)
    assert (one.low, one.high) != (two.low, two.high)
    assert (one.seed, two.seed) == (0, 1)


def test_equal_blocks_have_an_interval_without_width():
    found = bootstrap_mean([np.array([1.0, 3.0])] * 30, SETTINGS)
    assert (found.low, found.high) == (2, 2)


def test_the_interval_holds_the_mean_and_is_inside_the_blocks_means():
    blocks = blocks_of(30)
    found = bootstrap_mean(blocks, SETTINGS)
    means = [block.mean() for block in blocks]
    assert min(means) < found.low < np.mean(blocks) < found.high < max(means)


def test_the_interval_is_about_as_wide_as_the_standard_error_says():
    blocks = blocks_of(200)
    found = bootstrap_mean(blocks, DivergenceSettings())
    error = np.std([block.mean() for block in blocks]) / sqrt(200)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_a_long_block_counts_for_its_positions():
    # two blocks: 1 position of 0 and 9 positions of 1; the resampled mean is 0, 9/10 or 1
    found = bootstrap_mean([np.zeros(1), np.ones(9)], SETTINGS)
    assert (found.low, found.high) == (0, 1)
    random = np.random.default_rng(0).integers(0, 2, (500, 2)).sum(axis=1)
    means = np.array([0, 0.9, 1])[random]
    assert set(means) == {0, 0.9, 1}
    assert found.low == np.quantile(means, 0.025)


def test_few_blocks_are_cautioned_against():
    assert bootstrap_mean(blocks_of(19), SETTINGS).caution == "only 19 blocks: the interval is too narrow"
    assert bootstrap_mean(blocks_of(20), SETTINGS).caution is None


def test_one_block_has_no_interval():
    found = bootstrap_mean(blocks_of(1), SETTINGS)
    assert (found.low, found.high, found.caution) == (None, None, "one block: no interval")


def test_an_infinite_position_leaves_no_interval():
    found = bootstrap_mean([np.array([1.0, inf]), *blocks_of(25)], SETTINGS)
    assert (found.low, found.high) == (None, None)


# Chance


def picks(seed):
    """A thousand tokens as unevenly distributed as words are."""
    return np.random.default_rng(seed).zipf(1.5, 1000).clip(max=500)


def test_shuffled_picks_agree_as_often_as_chance():
    tokens = picks(0)
    found = chance_agreement(tokens, np.random.default_rng(1).permutation(tokens))
    assert found.is_chance


def test_picks_that_mostly_agree_are_not_chance():
    tokens = picks(0)
    other = np.where(np.arange(1000) % 5 == 0, 501, tokens)
    found = chance_agreement(tokens, other)
    assert (found.is_chance, found.agreement) == (False, 0.8)


def test_picks_that_never_agree_are_chance_or_below():
    assert chance_agreement(np.zeros(100, np.int64), np.ones(100, np.int64)).is_chance


def test_expected_agreement_by_hand():
    # shares 3/4, 1/4 and 1/2, 1/2
    found = chance_agreement(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]))
    assert (found.agreement, found.expected) == (3 / 4, 3 / 4 * 1 / 2 + 1 / 4 * 1 / 2)


# Spans


def span(kind, start, end):
    return Span(kind=kind, turn=1, start=start, end=end)


def test_a_position_is_in_the_span_of_the_token_that_it_predicts():
    positions = np.array([3, 7, 11, 15])  # predict tokens 4, 8, 12, 16
    masks = span_of(positions, [span("tool_call", 4, 8), span("tool_call", 16, 20)])
    assert masks["tool_call"].tolist() == [True, False, False, True]
    assert masks["not_tool_call"].tolist() == [False, True, True, False]


def test_kinds_of_spans_may_overlap():
    masks = span_of(np.array([3, 7, 11]), [span("generated", 0, 10), span("tool_call", 4, 6)])
    assert masks["generated"].tolist() == [True, True, False]
    assert masks["tool_call"].tolist() == [True, False, False]
    assert masks["tool_result"].tolist() == [False, False, False]


def test_without_spans_no_position_is_in_a_call():
    masks = span_of(np.array([3, 7]), [])
    assert masks["not_tool_call"].tolist() == [True, True]


# Captures


def values_of(path):
    with Capture(path) as capture:
        return float_values(capture.bits("words", 0, len(capture.positions("words"))), capture.logits_dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_block_by_block_gives_the_same_as_all_rows_at_once(write_capture, dtype):
    random = np.random.default_rng(5)
    logits = random.normal(0, 4, (77, 64))  # two whole blocks of 32 and a part of one
    a = write_capture("a.h5", logits, dtype=dtype)
    b = write_capture("b.h5", logits + random.normal(0, 0.1, logits.shape), dtype=dtype)
    with Capture(a) as reference, Capture(b) as variant:
        one = compare_prompt(reference, variant, "words")
        found, tops = one.columns, one.tops
    whole = compare_rows(values_of(a), values_of(b))
    for name in COLUMNS:
        np.testing.assert_allclose(found[name], whole[name], rtol=1e-14, atol=1e-300, err_msg=name)
    assert tops.tolist() == [values_of(a).argmax(axis=1).tolist(), values_of(b).argmax(axis=1).tolist()]


def test_the_figures_are_those_of_the_stored_bits(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits + 0.25 * np.cos(logits), arm="int8")
    found = diverge(a, b, SETTINGS)
    expected = compare_rows(values_of(a), values_of(b))
    assert (found.reference, found.variant, found.outcome) == ("reference", "int8", "measured")
    assert found.overall.mean == pytest.approx(expected["kl"].mean(), rel=1e-14)
    assert found.overall == found.prompts["words"]
    assert (found.every, found.vocab_size, found.overall.positions) == (4, 64, 12)
    assert (found.excluded_positions, found.nonfinite_positions) == (0, 0)
    assert (found.direction, found.unit, found.method_version) == ("KL(reference‖variant)", "nats", METHOD_VERSION)


def test_identical_captures_have_a_divergence_of_exactly_zero(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits)
    found = diverge(a, b, SETTINGS)
    assert (found.overall.mean, found.overall.maximum, found.overall.mean_js, found.overall.flips) == (0, 0, 0, 0)
    assert (found.interval.low, found.interval.high) == (0, 0)


def test_the_variant_may_have_another_logits_dtype(write_capture, logits):
    a, b = write_capture("a.h5", logits, dtype="float32"), write_capture("b.h5", logits)
    found = diverge(a, b, SETTINGS)
    assert found.logits_dtype == {"reference": "float32", "variant": "bfloat16"}
    assert found.overall.mean == pytest.approx(compare_rows(values_of(a), values_of(b))["kl"].mean(), rel=1e-14)


def test_all_positions_weigh_the_same_over_prompts_of_different_length(write_capture, logits):
    a = write_capture("a.h5", {"long": logits[:9], "short": logits[9:]})
    b = write_capture("b.h5", {"long": logits[:9] * 1.5, "short": logits[9:] * 0.5})
    found = diverge(a, b, SETTINGS)
    parts = found.prompts
    assert found.overall.mean == pytest.approx((9 * parts["long"].mean + 3 * parts["short"].mean) / 12, rel=1e-13)
    assert found.overall.mean != pytest.approx((parts["long"].mean + parts["short"].mean) / 2, rel=1e-3)


def test_windows_share_out_every_position_once(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.5)
    found = diverge(a, b, DivergenceSettings(window_tokens=16, min_windows=2, bootstrap_resamples=100))
    expected = compare_rows(values_of(a), values_of(b))
    assert [(one.start, one.stop, one.positions) for one in found.windows] == [(0, 16, 4), (16, 32, 4), (32, 48, 4)]
    assert [one.mean for one in found.windows] == pytest.approx(expected["kl"].reshape(3, 4).mean(axis=1), rel=1e-13)
    assert (found.interval.blocks, found.window_rule) == (3, "words: 16 tokens, 4 probes")


def test_a_position_at_the_boundary_is_in_the_later_window(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.5)
    found = diverge(a, b, DivergenceSettings(window_tokens=15, min_windows=2, bootstrap_resamples=100))
    assert [(one.start, one.stop, one.positions) for one in found.windows] == [
        (0, 15, 3),
        (15, 30, 4),
        (30, 45, 4),
        (45, 48, 1),
    ]


def test_spans_are_summarised_by_kind(write_capture, logits, tmp_path):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.5)
    record = PromptRecord(
        prompt="words",
        about="a few words",
        rendering="plain text",
        bos="none",
        begins_with_bos=False,
        tokenizer_sha256="1",
        chat_template_sha256="2",
        text_sha256="3",
        n_tokens=48,
        token_ids=list(range(48)),
        spans=[span("tool_call", 4, 9)],
    )
    spans = tmp_path / "words.json"
    record.write(spans)
    found = diverge(a, b, SETTINGS, prompt_paths=[spans])
    kl = compare_rows(values_of(a), values_of(b))["kl"]
    assert {kind: one.positions for kind, one in found.spans.items()} == {"tool_call": 2, "not_tool_call": 10}
    assert found.spans["tool_call"].mean == pytest.approx(kl[:2].mean(), rel=1e-13)
    assert found.spans["not_tool_call"].mean == pytest.approx(kl[2:].mean(), rel=1e-13)


def test_the_noise_floor_compares_two_launches_of_the_reference(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.5)
    second = write_capture("c.h5", logits + 0.1 * np.sin(9 * logits), launch=2)
    found = diverge(a, b, SETTINGS, second_launch=second)
    assert found.noise_floor.mean == pytest.approx(
        compare_rows(values_of(a), values_of(second))["kl"].mean(), rel=1e-13
    )
    assert sorted(found.parents) == ["reference", "second_launch", "variant"]


def test_a_variant_whose_tokens_are_shuffled_is_flagged(write_capture):
    logits = np.random.default_rng(8).normal(0, 4, (100, 64))
    shuffled = logits[np.random.default_rng(9).permutation(100)]
    a, b, near = (write_capture(name, one) for name, one in (("a", logits), ("b", shuffled), ("c", logits * 1.01)))
    assert diverge(a, b, SETTINGS).chance.is_chance
    assert not diverge(a, near, SETTINGS).chance.is_chance


def test_infinite_positions_are_counted_not_dropped(write_capture, logits):
    impossible = logits.copy()
    impossible[[2, 7], 0] = -inf
    found = diverge(write_capture("a.h5", logits), write_capture("b.h5", impossible), SETTINGS)
    assert (found.overall.positions, found.overall.infinite, found.overall.mean) == (12, 2, inf)
    assert (found.interval.low, found.interval.high) == (None, None)


def test_a_divergence_written_and_read_again_is_equal(write_capture, logits, tmp_path):
    impossible = logits.copy()
    impossible[2, 0] = -inf
    found = diverge(write_capture("a.h5", logits), write_capture("b.h5", impossible), SETTINGS)
    found.write(tmp_path / "divergence.json")
    assert Divergence.read(tmp_path / "divergence.json") == found


def test_an_infinite_divergence_fits_its_schema(write_capture, logits, tmp_path):
    impossible = logits.copy()
    impossible[2, 0] = -inf
    diverge(write_capture("a.h5", logits), write_capture("b.h5", impossible), SETTINGS).write(tmp_path / "d.json")
    content = json.loads((tmp_path / "d.json").read_text(encoding="utf-8"))
    jsonschema.validate(content, Divergence.model_json_schema(mode="serialization"))


def test_every_positions_columns_are_written(write_capture, logits, tmp_path):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.5, arm="int8")
    diverge(a, b, SETTINGS, positions_path=tmp_path / "out" / "int8.h5")
    expected = compare_rows(values_of(a), values_of(b))
    with h5py.File(tmp_path / "out" / "int8.h5") as file:
        assert (file.attrs["format"], file.attrs["variant"]) == ("kldaudit-divergence", "int8")
        group = file["prompts/words"]
        assert sorted(group) == sorted([*COLUMNS, "positions"])
        assert group["positions"][:].tolist() == list(range(3, 48, 4))
        np.testing.assert_allclose(group["kl"][:], expected["kl"], rtol=1e-14)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["int8.h5"]


def test_a_refused_variant_is_an_outcome(write_capture, logits, tmp_path):
    write_refusal(tmp_path / "b.h5", {"audit": "test", "arm": "int8"}, "no such kernel")
    found = diverge(write_capture("a.h5", logits), tmp_path / "b.h5", SETTINGS, positions_path=tmp_path / "p.h5")
    assert (found.outcome, found.reason, found.variant, found.overall) == ("refused", "no such kernel", "int8", None)
    with h5py.File(tmp_path / "p.h5") as file:
        assert (file.attrs["outcome"], "prompts" in file) == ("refused", False)


@pytest.mark.parametrize(("bad", "kind"), [(nan, "NaN"), (inf, r"\+inf")], ids=["NaN", "inf"])
@pytest.mark.parametrize("side", ["reference", "variant"])
def test_logits_that_are_no_distribution_are_refused_with_their_position(write_capture, logits, bad, kind, side):
    broken = logits.copy()
    broken[5, 9] = bad
    paths = {"reference": write_capture("a.h5", logits), "variant": write_capture("b.h5", logits)}
    paths[side] = write_capture("broken.h5", broken)
    with pytest.raises(LogitsError, match=rf"broken\.h5, prompt words, position 23[\s\S]*found: {kind}"):
        diverge(paths["reference"], paths["variant"], SETTINGS)


def test_a_row_of_only_impossible_tokens_is_refused(write_capture, logits):
    broken = logits.copy()
    broken[5] = -inf
    with pytest.raises(LogitsError, match=r"position 23[\s\S]*found: only -inf"):
        diverge(write_capture("a.h5", logits), write_capture("b.h5", broken), SETTINGS)


def test_the_position_of_a_bad_row_is_right_beyond_the_first_block(write_capture):
    logits = np.zeros((50, 64))
    broken = logits.copy()
    broken[40, 0] = nan
    with pytest.raises(LogitsError, match=r"position 163\n"):
        diverge(write_capture("a.h5", logits), write_capture("b.h5", broken), SETTINGS)


def test_captures_of_different_vocabularies_are_refused(write_capture, logits):
    with pytest.raises(MismatchError, match=r"vocabulary size[\s\S]*expected: 64\n  found: 32"):
        diverge(write_capture("a.h5", logits), write_capture("b.h5", logits[:, :32]), SETTINGS)


def test_captures_of_different_prompts_are_refused(write_capture, logits):
    with pytest.raises(MismatchError, match="differ in their prompts"):
        diverge(write_capture("a.h5", logits), write_capture("b.h5", {"calls": logits}), SETTINGS)


def test_captures_of_different_histories_are_refused(write_capture, logits):
    with pytest.raises(MismatchError, match="token ids of prompt words"):
        diverge(write_capture("a.h5", logits), write_capture("b.h5", logits, token_ids=np.ones(48)), SETTINGS)


def test_captures_of_different_positions_are_refused(write_capture, logits):
    tokens = np.ones(48)
    a = write_capture("a.h5", logits, token_ids=tokens)
    b = write_capture("b.h5", np.vstack([logits, logits]), token_ids=tokens, every=2)
    with pytest.raises(MismatchError, match="positions of prompt words"):
        diverge(a, b, SETTINGS)


def test_a_second_launch_of_another_history_is_refused(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits)
    second = write_capture("c.h5", logits, token_ids=np.ones(48), launch=2)
    with pytest.raises(MismatchError, match="token ids"):
        diverge(a, b, SETTINGS, second_launch=second)


def test_another_arm_is_no_second_launch_of_the_reference(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits, arm="int8", launch=2)
    with pytest.raises(MismatchError, match="not launches of one arm"):
        diverge(a, b, SETTINGS, second_launch=b)


def test_a_prompt_record_of_other_tokens_is_refused(write_capture, logits, tmp_path):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits)
    other = PromptRecord(
        prompt="words", about="a", rendering="a", bos="a", begins_with_bos=False, tokenizer_sha256="a",
        chat_template_sha256="a", text_sha256="a", n_tokens=48, token_ids=list(range(1, 49)), spans=[],
    )  # fmt: skip
    other.write(tmp_path / "words.json")
    with pytest.raises(MismatchError, match="prompt record words"):
        diverge(a, b, SETTINGS, prompt_paths=[tmp_path / "words.json"])


def test_a_missing_prompt_record_is_refused(write_capture, logits, tmp_path):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits)
    with pytest.raises(RecordError):
        diverge(a, b, SETTINGS, prompt_paths=[tmp_path / "none.json"])


def test_the_smallest_distance_of_bfloat16_is_seen(write_capture, bits_of, logits):
    """One unit in the last place of the top logit: KL = p (1 - p) d² / 2 + …, in 60 digits."""
    bits = bits_of(logits[:1], "bfloat16")
    changed = bits.copy()
    changed[0, float_values(bits, "bfloat16")[0].argmax()] += 1
    a, b = write_capture("a.h5", bits), write_capture("b.h5", changed)
    with mpmath.workdps(60):
        expected = float(kl_in_60_digits(probabilities(values_of(a)[0]), probabilities(values_of(b)[0])))
    assert diverge(a, b, SETTINGS).overall.mean == pytest.approx(expected, rel=1e-12)
    assert expected > exp(-20)
