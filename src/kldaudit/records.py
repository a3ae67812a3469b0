"""Records: the JSON files through which the steps speak to each other.

A record is a frozen model that refuses unknown keys. On disk it has sorted keys and no timestamps, host names or
absolute paths, so that the same facts give the same bytes.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from kldaudit.digests import file_sha256
from kldaudit.errors import RecordError

Real = Annotated[float, WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "Infinity"}]})]
"""A number that may be +inf, which JSON has no number for."""


class Frozen(BaseModel):
    """A part of a record: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Record(Frozen):
    """A JSON file with a schema version and the digests of the files it was made from."""

    schema_version: Literal["1"] = "1"
    parents: dict[str, str] = Field(default_factory=dict, description="Name of each input and the SHA-256 of its file.")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and validate the record in a file."""
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            raise RecordError(
                f"{path} is no {cls.__name__} record",
                where=str(path),
                expected=f"schema version {cls.model_fields['schema_version'].default}",
                found=first_error(error),
                do="make the file again with this version of kldaudit",
            ) from error

    def write(self, path: Path) -> None:
        """Write the record, whole or not at all."""
        write_json(path, json.loads(self.model_dump_json()))


def first_error(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, in one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the top level"
    return f"{place}: {first['msg']}"


def read_text(path: Path) -> str:
    """Text of a file that a step needs; a clear error where it cannot be had."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(
            f"cannot read {path}",
            where=str(path),
            expected="a readable UTF-8 text file",
            found=str(error),
            do="check the path, or run the step that makes this file",
        ) from error


def read_json(path: Path) -> Any:
    """Parsed JSON of a file; a clear error where it cannot be had."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path} is not JSON",
            where=f"{path}, line {error.lineno}",
            expected="JSON",
            found=error.msg,
            do="make the file again",
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON with sorted keys, whole or not at all."""
    write_text(path, json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, then rename it."""
    if not path.name or (path.exists() and not path.is_file()):
        raise RecordError(
            "cannot write there",
            where=str(path),
            expected="the name of a file",
            found="no file" if path.name else "no name",
            do="give another output",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def digests_of(**paths: Path) -> dict[str, str]:
    """The ``parents`` of a record: SHA-256 of each named input file."""
    return {name: file_sha256(path) for name, path in paths.items()}
