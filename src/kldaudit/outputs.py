"""What a command writes is none of what it reads."""

from collections.abc import Sequence
from pathlib import Path

from kldaudit.errors import RecordError


def keep_apart(inputs: Sequence[Path | None], outputs: Sequence[Path | None]) -> None:
    """Refuse outputs that would overwrite an input or each other.

    Raises:
        RecordError: two of them are the same file.
    """
    read = {path.resolve() for path in inputs if path is not None}
    written = [path.resolve() for path in outputs if path is not None]
    for path in written:
        if path in read or written.count(path) > 1:
            raise RecordError(
                "a file would be overwritten",
                where=str(path),
                expected="outputs that are none of the inputs and not the same file",
                found="the same file twice",
                do="give another output",
            )
