"""``launch{n}.manifest.json``: what was there when the logits were computed.

A value that could not be read is a string that begins with ``unknown:`` and says why. Absolute paths are written
relative to what they lie in: ``{environment}/…`` (the virtual environment), ``{python}/…`` (its interpreter),
``{checkpoint}``, ``{job}``, ``{home}``.
"""

from typing import Any

from pydantic import Field

from kldaudit.records import Frozen, Record


class Asked(Frozen):
    """One setting: what was asked for and what ran."""

    setting: str = Field(description="Name of the setting.")
    asked: str = Field(description="What the audit or the checkpoint asks for.")
    got: str = Field(description="What the engine selected; several values are joined with their layer counts.")
    honoured: bool = Field(description="False where something else ran.")
    unsupported: bool = Field(False, description="True where the backend says that it does not implement it.")


class PythonPackage(Frozen):
    """One installed Python distribution."""

    name: str = Field(description="Lower case.")
    version: str
    record_sha256: str = Field(description="SHA-256 of the RECORD file's portable lines, or `unknown: why`.")
    installer: str = Field(description="INSTALLER, such as pip, or `unknown: why`.")
    origin: str | None = Field(
        description="direct_url.json: URL without credentials, commit or archive hash; null if it came from an index."
    )


class DebianPackage(Frozen):
    """One Debian package that dpkg knows and that is not merely removed."""

    name: str = Field(description="With the architecture where dpkg needs it to tell packages apart.")
    version: str
    architecture: str
    source: str
    source_version: str
    status: str = Field(description="dpkg's db:Status-Status, such as installed or half-configured.")


class StrayFile(Frozen):
    """A shared object that no Debian package and no Python distribution lists."""

    path: str
    sha256: str


class Library(Frozen):
    """A shared object that an engine process had mapped at the end of the run."""

    path: str = Field(description="{environment}/… or a path in the image.")
    sha256: str = Field(description="Of the file that is mapped, or `unknown: why`.")
    owner: str = Field(description="python:NAME==VERSION, debian:NAME=VERSION, interpreter:NAME=VERSION, or none.")
    as_packaged: bool | None = Field(
        description="Whether the hash is the one that the owner installed; null where the owner states none."
    )
    soname: str | None = Field(description="DT_SONAME, null if it has none.")
    version: str | None = Field(description="Version from the file's name, such as 1.0.0 of libgomp.so.1.0.0.")
    symbol_versions: list[str] = Field(
        default_factory=list, description="Newest version that it defines of each family, such as GOMP_5.0.1."
    )


class Kernel(Frozen):
    """One kernel or operator that ran in the profiled prefill."""

    name: str
    count: int = Field(description="How often it ran.")
    share: float = Field(description="Its share of the profiled time (self time), 0 to 1; differs from run to run.")
    modules: list[str] = Field(description="Classes of the model's modules that it ran in, sorted.")
    family: str | None = Field(description="What its name tells: GEMM or attention family, MMA instructions; or null.")


class Manifest(Record):
    """What was there."""

    audit: str
    arm: str
    launch: int
    outcome: str = Field(description="captured, or refused: and the engine's reason.")
    asked: list[Asked] = Field(description="Asked for, and got; empty if the engine refused to load.")
    python: str = Field(description="Implementation and version.")
    python_packages: list[PythonPackage]
    debian_packages: list[DebianPackage] | str
    stray_files: list[StrayFile] | str
    libraries: list[Library] | str = Field(description="Loaded, not merely installed.")
    stack: dict[str, str] = Field(
        description="Versions of what really served: driver, CUDA, cuDNN, cuBLAS, NCCL, NVRTC, Triton, FlashInfer, "
        "oneDNN, OpenMP; each with the library that says so, or why there is none."
    )
    operating_system: str
    kernel: str = Field(description="Operating system's kernel.")
    libc: str
    cpu: dict[str, Any]
    gpu: list[dict[str, Any]] | str = Field(description="Each device through NVML, or why there is none.")
    caches: dict[str, Any] = Field(description="Autotune and JIT caches, before and after the run.")
    torch: dict[str, Any]
    engine: dict[str, Any] = Field(description="Name, version, commit, build, arguments, resolved configuration.")
    selected: dict[str, Any] = Field(description="What the engine selected, layer by layer.")
    kernels: list[Kernel] | str = Field(description="What ran in a profiled prefill, by name.")
    primitives: list[str] | str = Field(
        "unknown: recorded by the host", description="Versions and ISA of oneDNN and the primitives that it made."
    )
    environment: dict[str, str] = Field(description="Environment variables that can change the numbers.")
    capture: dict[str, Any] = Field(description="Positions taken per prompt and pass, and differing ones.")
    container: dict[str, Any] | str = Field(
        "unknown: recorded by the host", description="What only the host knows of the container, or why there is none."
    )
