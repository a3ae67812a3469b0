"""Numbers and short phrases, as the page writes them."""

import math
from typing import Any


def number(value: Any) -> str:
    """Three significant digits; scientific below 1e-3 and from 1e4 on.

    Records write infinities as strings, so anything that ``float`` takes is taken.
    """
    x = float(value)
    if math.isnan(x):
        return "undefined"
    if x == 0:
        return "0"
    if math.isinf(x):
        return "∞" if x > 0 else "−∞"
    rounded = float(f"{x:.3g}")
    if abs(rounded) < 1e-3 or abs(rounded) >= 1e4:
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{digits}f}"


def percent(part: float, whole: float) -> str:
    """A share in per cent: three significant digits, and exactly 0 or 100 only where it is; with a no-break space."""
    if part in (0, whole):
        return "0\u00a0%" if part == 0 else "100\u00a0%"
    share = number(100 * part / whole)
    return "> 99.9\u00a0%" if share == "100" else f"{share}\u00a0%"


def count(n: int, one: str, many: str | None = None) -> str:
    """``1 launch``, ``2 launches``."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def quantile_name(q: float) -> str:
    """``median``, ``p90``, ``p99.9``."""
    return "median" if q == 0.5 else f"p{100 * q:.10g}"
