"""The arithmetic of the divergence: arrays of logits in, one figure a position out. It knows no files."""

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

COLUMNS = {
    "kl": "KL(reference‖variant), nats",
    "kl_reverse": "KL(variant‖reference), nats",
    "js": "Jensen-Shannon divergence, nats",
    "entropy_reference": "entropy of the reference, nats",
    "entropy_variant": "entropy of the variant, nats",
    "delta_p": "probability of the reference's top token: variant minus reference",
    "flip": "1 where the greedy tokens differ (ties: lowest token id)",
    "tie_reference": "1 where the reference's largest logit is shared by several tokens",
    "tie_variant": "1 where the variant's largest logit is shared by several tokens",
    "flip_at_tie": "1 where a flip is only the choice between tokens that both hold as largest",
    "top5_overlap": "share of the reference's five most probable tokens among the variant's five",
    "top10_overlap": "the same for ten",
}


def compare_rows(reference: F64, variant: F64) -> dict[str, F64]:
    """Compare next-token distributions row by row.

    Args:
        reference: logits, FP64 [n, vocab_size]; -inf stands for probability 0.
        variant: logits, FP64 [n, vocab_size].

    Returns:
        FP64 [n] for each name of COLUMNS. With P = softmax(reference) and Q = softmax(variant):
        KL(P‖Q) = Σ p (log p - log q); a term with p = 0 contributes 0, one with p > 0 and q = 0 makes the sum +inf.
        JS = ½ KL(P‖M) + ½ KL(Q‖M) with M = (P + Q) / 2 (Lin 1991). No clamping, no truncation, no epsilon.
    """
    log_p, log_q = _log_probs(reference), _log_probs(variant)
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = _log_mean(log_p, log_q)
    top = reference.argmax(axis=1)
    top_variant = variant.argmax(axis=1)
    rows = np.arange(len(reference))
    flip = top != top_variant
    shared = (reference[rows, top_variant] == reference[rows, top]) | (variant[rows, top] == variant[rows, top_variant])
    return {
        "kl": _kl(p, log_p, log_q),
        "kl_reverse": _kl(q, log_q, log_p),
        "js": 0.5 * _kl(p, log_p, log_m) + 0.5 * _kl(q, log_q, log_m),
        "entropy_reference": _entropy(p, log_p),
        "entropy_variant": _entropy(q, log_q),
        "delta_p": q[rows, top] - p[rows, top],
        "flip": flip.astype(np.float64),
        "tie_reference": _tied(reference),
        "tie_variant": _tied(variant),
        "flip_at_tie": (flip & shared).astype(np.float64),
        "top5_overlap": _overlap(reference, variant, 5),
        "top10_overlap": _overlap(reference, variant, 10),
    }


def _log_probs(logits: F64) -> F64:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _kl(p: F64, log_p: F64, log_q: F64) -> F64:
    """Σ p (log p - log q), summed as p (log p - log q) - p + q: each term ≥ 0, so rounding cannot make it negative.

    Where p and q are close, q - p is p expm1(log q - log p), which does not cancel.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(p > 0, log_p - log_q, 0.0)
        close = p * (difference + np.expm1(-difference))
        apart = p * difference + (np.exp(log_q) - p)
        terms = np.where(p > 0, np.where(np.abs(difference) < 1, close, apart), np.exp(log_q))
    return np.asarray(np.maximum(terms, 0.0).sum(axis=1))


def _log_mean(log_p: F64, log_q: F64) -> F64:
    """Log of (p + q) / 2, from logs: exactly log p where the two are equal, finite where either is."""
    with np.errstate(invalid="ignore"):
        gap = np.where(log_p == log_q, 0.0, -np.abs(log_p - log_q))
    return np.asarray(np.maximum(log_p, log_q) + np.log1p(0.5 * np.expm1(gap)))


def _entropy(p: F64, log_p: F64) -> F64:
    return np.asarray(-np.where(p > 0, p * np.where(p > 0, log_p, 0.0), 0.0).sum(axis=1))


def _tied(logits: F64) -> F64:
    return np.asarray(((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).astype(np.float64))


def _overlap(reference: F64, variant: F64, k: int) -> F64:
    """Share of common tokens among the k largest of each; equal logits are ordered by token id."""
    k = min(k, reference.shape[1])
    order_a = np.argsort(-reference, axis=1, kind="stable")[:, :k]
    order_b = np.argsort(-variant, axis=1, kind="stable")[:, :k]
    return np.asarray((order_a[:, :, None] == order_b[:, None, :]).any(axis=2).mean(axis=1))
