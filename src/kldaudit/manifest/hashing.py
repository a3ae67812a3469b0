"""SHA-256 of files, remembered by what changes when a file does."""

import json
import os
from pathlib import Path

from kldaudit.digests import file_sha256
from kldaudit.records import write_text

LIMIT = 20_000
"""Files that are remembered; a fuller memory begins afresh."""


class Hashes:
    """SHA-256 of files, kept in a JSON file between runs."""

    def __init__(self, memory: Path | None) -> None:
        """Read the memory; a missing or damaged one is empty, None keeps nothing."""
        self.memory = memory
        self.known: dict[str, str] = {}
        if memory is not None and memory.exists():
            try:
                content = json.loads(memory.read_text(encoding="utf-8"))
                self.known = {str(key): str(value) for key, value in content.items()}
            except (OSError, ValueError, AttributeError):
                self.known = {}  # it only saves time
        if len(self.known) > LIMIT:
            self.known = {}

    def sha256(self, path: Path) -> str:
        """SHA-256 of a file's bytes; known ones by device, inode, size and times of change are not read again."""
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"
        if key not in self.known:
            self.known[key] = file_sha256(path)
        return self.known[key]

    def keep(self) -> None:
        """Write the memory, whole; of several writers the last one wins."""
        if self.memory is not None and os.access(self.memory.parent, os.W_OK):
            write_text(self.memory, json.dumps(self.known, sort_keys=True))
