"""What can go wrong.

KldauditError                 any of these: one message, exit code 2
├── AuditError                the audit file asks for something that cannot be
├── RecordError               a record (JSON) is missing, malformed or of another version
├── CaptureFileError          a capture is incomplete, damaged or not a capture
├── MismatchError             two captures cannot be compared with each other
├── LogitsError               logits that are no distribution (NaN, +inf, all -inf)
├── CheckpointError           a checkpoint cannot be resolved, expanded or quantized
├── PromptError               a prompt cannot be rendered or does not fit the model
├── EngineError               the engine's environment or process failed
└── ExportError               a manifest cannot be exported
"""


class KldauditError(Exception):
    """Base of all errors that end a command with one message and exit code 2."""

    def __init__(self, what: str, *, where: str, expected: str = "", found: str = "", do: str = "") -> None:
        """Compose the message: what, where, expected, found, and what to do next."""
        parts = [
            ("where", where),
            ("expected", expected),
            ("found", found),
            ("what to do", do),
        ]
        super().__init__("\n".join([what, *(f"  {k}: {v}" for k, v in parts if v)]))


class AuditError(KldauditError):
    """The audit file asks for something that cannot be."""


class RecordError(KldauditError):
    """A record is missing, malformed or of another version."""


class CaptureFileError(KldauditError):
    """A capture is incomplete, damaged or not a capture."""


class MismatchError(KldauditError):
    """Two captures cannot be compared with each other."""


class LogitsError(KldauditError):
    """Logits that are no distribution."""


class CheckpointError(KldauditError):
    """A checkpoint cannot be resolved, expanded or quantized."""


class PromptError(KldauditError):
    """A prompt cannot be rendered or does not fit the model."""


class EngineError(KldauditError):
    """The engine's environment or process failed."""


class ExportError(KldauditError):
    """A manifest cannot be exported."""
