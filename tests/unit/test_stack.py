from kldaudit.manifest.record import Library
from kldaudit.manifest.stack import NOT_LOADED, PATTERNS, _cuda, _driver, _said, stack


def library(path, version=None, symbols=()):
    return Library(
        path=path, sha256="11", owner="python:torch==2", as_packaged=True, soname=None, version=version,
        symbol_versions=list(symbols),
    )  # fmt: skip


def test_two_openmp_runtimes_are_both_named():
    found = _said("OpenMP", [library("/a/libgomp.so.1.0.0", "1.0.0", ["GOMP_5.0.1"]), library("/b/libiomp5.so")])
    assert found == (
        "1.0.0, GOMP_5.0.1 (libgomp.so.1.0.0, python:torch==2); version not in its name (libiomp5.so, python:torch==2)"
    )


def test_a_part_that_is_not_mapped_is_not_loaded():
    assert _said("NCCL", []) == NOT_LOADED


def test_a_library_that_is_not_mapped_here_is_not_opened_for_its_version():
    found = _said("cuDNN", [library("/nowhere/libcudnn.so.9")])
    assert found.startswith("unknown: cudnnGetVersion: ")


def test_cuda_versions_are_thousands_and_tens():
    def runtime(pointer):
        pointer._obj.value = 13010
        return 0

    assert _cuda(runtime) == "13.1"


def test_where_the_libraries_are_unknown_so_are_their_versions():
    found = stack("unknown: /proc cannot be read")
    assert set(PATTERNS) < set(found)
    assert set(found.values()) == {"unknown: /proc cannot be read"}


def test_the_driver_is_read_from_the_kernel_module_or_there_is_none():
    assert _driver().startswith("none: ") or _driver()[0].isdigit()
