"""What NVML cannot say is unknown for that field alone; the real device is tested in tests/gpu."""

from kldaudit.manifest.gpu import FIELDS, _asked, _without_nvml


class NVMLError(Exception):
    pass


class Nvml:
    """An NVML that supports nothing but the driver's version."""

    NVMLError = NVMLError

    def nvmlSystemGetDriverVersion(self):  # noqa: N802 - NVML's name
        return b"580.159.04"

    def __getattr__(self, name):
        if name.startswith("NVML_"):
            return 1

        def refuse(*_):
            raise NVMLError("Not Supported")

        return refuse


def test_a_field_that_the_device_does_not_support_says_so():
    assert _asked(Nvml(), FIELDS["vbios"], object()) == "unknown: NVML says Not Supported"


def test_a_part_of_a_field_that_is_not_supported_says_so():
    assert _asked(Nvml(), FIELDS["mig"], object()) == {
        "current": "unknown: NVML says Not Supported",
        "pending": "unknown: NVML says Not Supported",
    }


def test_what_is_supported_is_read():
    assert _asked(Nvml(), FIELDS["driver"], object()) == "580.159.04"


def test_a_device_that_nvml_does_not_know_is_unknown_in_every_field():
    assert _asked(Nvml(), FIELDS["driver"], NVMLError("Not Found")) == "unknown: NVML says Not Found"


def test_without_nvml_name_and_sm_stay():
    (found,) = _without_nvml([{"name": "H200", "sm": "9.0"}], "unknown: no pynvml")
    assert (found["name"], found["sm"], found["vbios"]) == ("H200", "9.0", "unknown: no pynvml")
    assert set(FIELDS) < set(found)
