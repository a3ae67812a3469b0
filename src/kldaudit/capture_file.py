"""The capture file, version 1: the HDF5 file of one launch. Its rules stand in docs/capture-format.md."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import h5py
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from kldaudit.digests import row_digests
from kldaudit.errors import CaptureFileError, KldauditError, MismatchError

FORMAT = "kldaudit-capture"
FORMAT_VERSION = "1.0"
ROOT_ATTRIBUTES = ("audit", "arm", "launch", "vocab_size", "logits_dtype", "spec_sha256")
BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
"""Unsigned integer type that holds the raw bits of each logits dtype."""


def hdf5_type(logits_dtype: str) -> h5py.h5t.TypeID:
    """HDF5 floating-point type of a logits dtype; BF16 has the fields of bfloat16 (bias 127, 7 mantissa bits)."""
    if logits_dtype == "bfloat16":
        kind = h5py.h5t.IEEE_F16LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_size(2)
        kind.set_ebias(127)
        return kind
    return {"float16": h5py.h5t.IEEE_F16LE, "float32": h5py.h5t.IEEE_F32LE}[logits_dtype]


def float_values(bits: NDArray[Any], logits_dtype: str) -> NDArray[np.float64]:
    """FP64 values of raw logit bits; exact, because every stored type is a subset of FP64."""
    if logits_dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view({"float16": np.float16, "float32": np.float32}[logits_dtype]).astype(np.float64)


class CaptureWriter:
    """Writes one capture under a temporary name; ``finish`` makes it whole."""

    def __init__(self, path: Path, attributes: dict[str, Any]) -> None:
        """Create the file.

        Args:
            path: the temporary name; its folder exists.
            attributes: the root attributes of ROOT_ATTRIBUTES.
        """
        self.path = path
        self.dtype = str(attributes["logits_dtype"])
        self.vocab_size = int(attributes["vocab_size"])
        self.file = h5py.File(path, "w")
        self.file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION})
        for name in ROOT_ATTRIBUTES:
            self.file.attrs[name] = attributes[name]

    def add_prompt(self, prompt: str, token_ids: NDArray[np.int32], positions: NDArray[np.int64]) -> None:
        """Add a prompt's group: token_ids int32 [n_tokens], positions int64 [n_positions]."""
        group = self.file.create_group(f"prompts/{prompt}")
        group.create_dataset("token_ids", data=token_ids.astype(np.int32))
        group.create_dataset("positions", data=positions.astype(np.int64))

    def create_logits(self, name: str, rows: int) -> h5py.Dataset:
        """Create an empty logits dataset [rows, vocab_size], one row a chunk, Bitshuffle + LZ4."""
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, self.vocab_size))
        bitshuffle = hdf5plugin.Bitshuffle(cname="lz4")
        properties.set_filter(bitshuffle.filter_id, h5py.h5z.FLAG_MANDATORY, bitshuffle.filter_options)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        links.set_create_intermediate_group(True)
        space = h5py.h5s.create_simple((rows, self.vocab_size))
        identifier = h5py.h5d.create(
            self.file.id, name.encode(), hdf5_type(self.dtype), space, dcpl=properties, lcpl=links
        )
        return h5py.Dataset(identifier)

    def write_rows(self, dataset: h5py.Dataset, start: int, bits: NDArray[Any]) -> None:
        """Write raw bits [n, vocab_size] (of the type in BITS) into rows start … start + n - 1."""
        target = dataset.id.get_space()
        target.select_hyperslab((start, 0), bits.shape)
        memory = h5py.h5s.create_simple(bits.shape)
        try:
            dataset.id.write(memory, target, np.ascontiguousarray(bits), mtype=hdf5_type(self.dtype))
        except RuntimeError as error:  # HDF5's own word for some failed writes
            raise OSError(f"cannot write {self.path}: {error}") from error

    def write_digests(
        self,
        prompt: str,
        row_digest: NDArray[np.uint64],
        layer_digest: NDArray[np.uint64] | None,
        layer_names: list[str],
    ) -> None:
        """Add row_digest uint64 [n_passes, n_positions] and layer_digest uint64 [n_passes, n_layers, n_positions]."""
        group = self.file[f"prompts/{prompt}"]
        group.create_dataset("row_digest", data=row_digest)
        if layer_digest is not None:
            dataset = group.create_dataset("layer_digest", data=layer_digest)
            dataset.attrs["layer_names"] = layer_names

    def finish(self) -> None:
        """Mark the file complete (the last thing written), close it and bring it to the disk."""
        self.file.flush()
        self.file.attrs["complete"] = True
        self.file.close()
        _to_disk(self.path)

    def abandon(self) -> None:
        """Close the file without a completion mark and remove it."""
        with suppress(OSError, RuntimeError):  # a full disk fails again while HDF5 flushes its cache
            self.file.close()
        self.path.unlink(missing_ok=True)


def write_refusal(path: Path, attributes: dict[str, Any], reason: str) -> None:
    """Write what stands in place of a capture when the engine refused the arm: the reason, no completion mark."""
    temporary = path.with_name(f".{path.name}.tmp")
    with h5py.File(temporary, "w") as file:
        file.attrs.update({"format": FORMAT, "format_version": FORMAT_VERSION, "refused": reason})
        file.attrs.update(attributes)
    _to_disk(temporary)
    temporary.replace(path)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _open(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise CaptureFileError(
            "cannot open the capture",
            where=str(path),
            expected="a readable HDF5 file",
            found=str(error),
            do="check the path; if the file is damaged, capture the arm again",
        ) from error


def _damaged(path: Path, part: str, error: Exception) -> CaptureFileError:
    return CaptureFileError(
        "the capture is damaged",
        where=f"{path}, {part}",
        expected="a capture as `kldaudit capture` wrote it",
        found=f"{type(error).__name__}: {' '.join(str(error).split())}",
        do="capture the arm again",
    )


class Capture:
    """Reads one complete capture."""

    def __init__(self, path: Path) -> None:
        """Open a capture and check that it is one, and whole."""
        self.path = path
        self.file = _open(path)
        try:
            self._check()
        except KldauditError:
            self.file.close()
            raise
        except (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            self.file.close()
            raise _damaged(path, "its structure", error) from error
        attributes = self.file.attrs
        self.arm = str(attributes["arm"])
        self.launch = int(attributes["launch"])
        self.vocab_size = int(attributes["vocab_size"])
        self.logits_dtype = str(attributes["logits_dtype"])
        self.spec_sha256 = str(attributes["spec_sha256"])

    def _check(self) -> None:
        attributes = self.file.attrs
        found = f"format {attributes.get('format', 'none')} {attributes.get('format_version', '')}".strip()
        if attributes.get("format") != FORMAT or str(attributes.get("format_version")).split(".")[0] != "1":
            raise CaptureFileError(
                "the file is no capture that this version reads",
                where=str(self.path),
                expected=f"format {FORMAT} 1.x",
                found=found,
                do="give a file that `kldaudit capture` wrote",
            )
        if "refused" in attributes:
            raise CaptureFileError(
                "the file holds no capture: the engine refused the arm",
                where=f"{self.path}, arm {attributes.get('arm')}",
                expected="a capture with logits",
                found=f"refused: {attributes['refused']}",
                do="compare another arm, or change this arm's settings",
            )
        if not isinstance(attributes.get("complete"), np.bool_) or not attributes["complete"]:
            raise CaptureFileError(
                "the capture is not complete",
                where=str(self.path),
                expected="the root attribute `complete`",
                found="none: writing it was interrupted",
                do="capture the arm again",
            )
        missing = [name for name in ROOT_ATTRIBUTES if name not in attributes]
        missing += [
            name for name in ("launch", "vocab_size") if not isinstance(attributes.get(name, 0), np.integer | int)
        ]
        prompts = self.file.get("prompts")
        if missing or not isinstance(prompts, h5py.Group) or not len(prompts):
            raise CaptureFileError(
                "the capture lacks required parts",
                where=str(self.path),
                expected=f"root attributes {', '.join(ROOT_ATTRIBUTES)} and a group /prompts with prompts",
                found=f"missing or of the wrong kind: {', '.join(missing) or 'prompts'}",
                do="capture the arm again",
            )
        if attributes["logits_dtype"] not in BITS:
            raise CaptureFileError(
                "the capture has an unknown logits dtype",
                where=str(self.path),
                expected=", ".join(BITS),
                found=str(attributes["logits_dtype"]),
                do="give a capture of format 1",
            )
        for prompt in self.file["prompts"]:
            self._check_prompt(prompt)

    def _check_prompt(self, prompt: str) -> None:
        group = self.file[f"prompts/{prompt}"]
        missing = [name for name in ("token_ids", "positions", "logits", "row_digest") if name not in group]
        if missing:
            raise CaptureFileError(
                f"prompt {prompt} of the capture is incomplete",
                where=f"{self.path}, /prompts/{prompt}",
                expected="token_ids, positions, logits, row_digest",
                found=f"missing: {', '.join(missing)}",
                do="capture the arm again",
            )
        wanted = {"token_ids": ("i", 1), "positions": ("i", 1), "row_digest": ("u", 2), "logits": ("f", 2)}
        kinds = {name: (group[name].dtype.kind, group[name].ndim) for name in wanted}
        if kinds != wanted:
            self._refuse_prompt(prompt, "parts of the wrong kind", wanted, kinds)
        if not group["logits"].id.get_type().equal(hdf5_type(str(self.file.attrs["logits_dtype"]))):
            found = f"a type of {group['logits'].dtype.itemsize} bytes, {group['logits'].dtype}"
            self._refuse_prompt(prompt, "logits of another type", str(self.file.attrs["logits_dtype"]), found)
        positions, n_tokens = group["positions"][:], len(group["token_ids"])
        every = int(positions[0]) + 1 if len(positions) else 0
        if every < 1 or not np.array_equal(positions, np.arange(every - 1, n_tokens, every)):
            self._refuse_prompt(
                prompt,
                "positions that are not every nth of its tokens",
                f"n - 1, 2 n - 1, … up to {n_tokens - 1}",
                positions,
            )
        if prompt != self.prompts[0] and every != int(self.positions(self.prompts[0])[0]) + 1:
            self._refuse_prompt(prompt, "another sampling step", f"as prompt {self.prompts[0]}", f"every {every}")
        shape = (len(positions), int(self.file.attrs["vocab_size"]))
        shapes = (group["logits"].shape, group["row_digest"].shape[1])
        if shapes != (shape, shape[0]):
            self._refuse_prompt(
                prompt,
                "logits of the wrong shape",
                f"[n_positions, vocab_size] = {list(shape)}",
                f"{list(shapes[0])}, row digests of {shapes[1]} positions",
            )
        passes = group["row_digest"].shape[0]
        if not passes:
            self._refuse_prompt(prompt, "no pass", "at least one", "row digests of none")
        if "layer_digest" in group:
            names = group["layer_digest"].attrs["layer_names"]
            layers = (passes, len(names), len(positions))
            if group["layer_digest"].shape != layers or group["layer_digest"].dtype != np.uint64:
                self._refuse_prompt(prompt, "layer digests of the wrong shape", layers, group["layer_digest"].shape)

    def _refuse_prompt(self, prompt: str, what: str, expected: object, found: object) -> None:
        raise CaptureFileError(
            f"prompt {prompt} of the capture has {what}",
            where=f"{self.path}, /prompts/{prompt}",
            expected=str(expected),
            found=str(found),
            do="capture the arm again",
        )

    def __enter__(self) -> Self:
        """Open for a with statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.file.close()

    @property
    def prompts(self) -> list[str]:
        """Ids of the prompts, sorted."""
        return sorted(self.file["prompts"])

    def token_ids(self, prompt: str) -> NDArray[np.int32]:
        """The forced history, int32 [n_tokens]."""
        return np.asarray(self.file[f"prompts/{prompt}/token_ids"][:])

    def positions(self, prompt: str) -> NDArray[np.int64]:
        """Stored positions, int64 [n_positions]: index of the token whose next-token logits are stored."""
        return np.asarray(self.file[f"prompts/{prompt}/positions"][:])

    def row_digest(self, prompt: str) -> NDArray[np.uint64]:
        """Digests of the logits, uint64 [n_passes, n_positions]."""
        return np.asarray(self.file[f"prompts/{prompt}/row_digest"][:])

    def layers(self, prompt: str) -> tuple[list[str], NDArray[np.uint64]]:
        """Layer names in the order in which they ran; digests, uint64 [n_passes, n_layers, n_positions]."""
        group = self.file[f"prompts/{prompt}"]
        if "layer_digest" not in group:
            return [], np.zeros((self.row_digest(prompt).shape[0], 0, len(self.positions(prompt))), np.uint64)
        dataset = group["layer_digest"]
        return [str(name) for name in dataset.attrs["layer_names"]], np.asarray(dataset[:])

    def bits(self, prompt: str, start: int, stop: int) -> NDArray[Any]:
        """Raw bits of logits rows start … stop - 1 of the first pass, [n, vocab_size]."""
        return self._read(f"prompts/{prompt}/logits", start, stop)

    def pass_bits(self, prompt: str, number: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Rows of a later pass that differ from the first: their indices [n] and raw bits [n, vocab_size]."""
        digests = self.row_digest(prompt)
        rows = np.flatnonzero(digests[number - 1] != digests[0])
        name = f"prompts/{prompt}/pass{number}"
        try:
            kept = np.asarray(self.file[f"{name}/rows"][:]) if name in self.file else np.zeros(0, np.int64)
            if not np.array_equal(kept, rows):
                raise ValueError(f"rows {kept} are kept, rows {rows} differ")
            if not len(rows):
                return rows, np.zeros((0, self.vocab_size), BITS[self.logits_dtype])
            bits = self._read(f"{name}/logits", 0, len(rows))
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self.path, f"/{name}", error) from error
        self.check_digests(prompt, bits, digests[number - 1][rows], rows.tolist())
        return rows, bits

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        dataset = self.file[name]
        bits = np.empty((stop - start, self.vocab_size), BITS[self.logits_dtype])
        source = dataset.id.get_space()
        source.select_hyperslab((start, 0), bits.shape)
        try:
            dataset.id.read(h5py.h5s.create_simple(bits.shape), source, bits, mtype=hdf5_type(self.logits_dtype))
        except (OSError, RuntimeError, ValueError) as error:
            raise _damaged(self.path, f"/{name}, rows {start} to {stop - 1}", error) from error
        return bits

    def blocks(self, prompt: str, rows: int = 64) -> Iterator[tuple[int, NDArray[Any]]]:
        """First row and raw bits of consecutive blocks of at most ``rows`` rows: bounded memory at any length.

        Raises:
            CaptureFileError: the stored bits are not those that the engine computed, by the digests that were taken
                on its device.
        """
        recorded = self.row_digest(prompt)[0]
        for start in range(0, len(recorded), rows):
            bits = self.bits(prompt, start, min(start + rows, len(recorded)))
            self.check_digests(prompt, bits, recorded[start : start + len(bits)], range(start, start + len(bits)))
            yield start, bits

    def check_digests(self, prompt: str, bits: NDArray[Any], recorded: NDArray[np.uint64], rows: Iterable[int]) -> None:
        """Refuse raw bits [n, vocab_size] whose digests are not the recorded ones, uint64 [n]; ``rows`` names them."""
        stored = row_digests(bits)
        for row, found, expected in zip(rows, stored, recorded, strict=True):
            if found != expected:
                raise CaptureFileError(
                    "the capture's logits are not the ones that were computed",
                    where=f"{self.path}, prompt {prompt}, row {row}",
                    expected=f"row digest {expected:016x}",
                    found=f"{found:016x}",
                    do="the file was damaged or changed: capture the arm again",
                )


def check_launches(a: Capture, b: Capture) -> None:
    """Refuse two captures that are not two launches of the same arm with the same settings."""
    for name, one, other in (("arm", a.arm, b.arm), ("spec_sha256", a.spec_sha256, b.spec_sha256)):
        if one != other:
            raise MismatchError(
                "the captures are not launches of one arm",
                where=f"{a.path} and {b.path}",
                expected=f"the same {name}: {one}",
                found=other,
                do="give captures that were made from the same spec",
            )
    if a.launch == b.launch:
        raise MismatchError(
            "the captures are the same launch",
            where=f"{a.path} and {b.path}",
            expected="two launches",
            found=f"launch {a.launch} twice",
            do="give captures of different launches",
        )


def refusal(path: Path) -> str | None:
    """Why the engine refused the arm, if this file stands in place of a capture; else None."""
    with _open(path) as file:
        reason = file.attrs.get("refused")
        return reason if file.attrs.get("format") == FORMAT and isinstance(reason, str) and reason else None


def check_disk_space(folder: Path, needed: int) -> None:
    """Refuse to begin writing ``needed`` bytes into a folder that has no room for them."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CaptureFileError(
            "not enough disk space for the capture",
            where=str(folder),
            expected=f"{needed / 1e6:.0f} MB free",
            found=f"{free / 1e6:.0f} MB",
            do="free some space or move the results to another disk",
        )
