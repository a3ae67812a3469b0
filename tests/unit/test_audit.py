import copy
from pathlib import Path

import jsonschema
import pytest
import yaml

from kldaudit import audit as audit_module
from kldaudit.audit import ArmSpec, Audit, Settings, arm_spec, audit_schema, parse_audit, read_audit
from kldaudit.errors import AuditError, RecordError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def content():
    return {
        "name": "small",
        "prompts": {"words": {"file": "words.txt", "about": "a few words"}},
        "checkpoints": {
            "base": {"source": "./model"},
            "w4a16": {"quantize": {"base": "base", "scheme": "W4A16", "group_size": 32}},
        },
        "settings": {"chunk": 512, "threads": 1},
        "arms": {
            "bf16": {"checkpoint": "base", "reference": True},
            "int4": {"checkpoint": "w4a16", "settings": {"chunk": 64}},
            "eager-off": {"checkpoint": "base", "settings": {"enforce_eager": False}},
        },
    }


def refusal_of(content) -> str:
    with pytest.raises(AuditError) as caught:
        parse_audit(content, where="audit.yaml")
    assert "where: audit.yaml" in str(caught.value)
    return str(caught.value)


def test_a_valid_audit_names_its_reference_and_its_variants_in_order(content):
    audit = parse_audit(content, where="audit.yaml")
    assert audit.reference == "bf16"
    assert audit.variants == ["int4", "eager-off"]


def test_an_arm_has_the_shared_settings_with_its_own_on_top(content):
    audit = parse_audit(content, where="audit.yaml")
    assert audit.arms["int4"].settings == Settings(chunk=64, threads=1)
    assert audit.arms["bf16"].settings == Settings(chunk=512, threads=1)


def test_what_is_not_said_has_the_documented_default(content):
    del content["settings"]
    audit = parse_audit(content, where="audit.yaml")
    assert audit.arms["bf16"].settings == Settings()
    assert (audit.capture.every, audit.capture.launches, audit.capture.passes) == (32, 2, 2)
    assert (audit.divergence.window_tokens, audit.divergence.min_windows) == (8000, 8)


def test_parsing_leaves_the_content_alone(content):
    before = copy.deepcopy(content)
    parse_audit(content, where="audit.yaml")
    assert content == before


def test_touching_one_arm_changes_only_its_own_spec(content):
    before = parse_audit(content, where="audit.yaml")
    content["arms"]["int4"]["settings"]["chunk"] = 128
    after = parse_audit(content, where="audit.yaml")
    assert arm_spec(before, "int4") != arm_spec(after, "int4")
    assert arm_spec(before, "bf16") == arm_spec(after, "bf16")
    assert arm_spec(before, "eager-off") == arm_spec(after, "eager-off")


def test_a_spec_holds_what_the_captures_depend_on(content):
    audit = parse_audit(content, where="audit.yaml")
    assert arm_spec(audit, "int4") == ArmSpec(
        audit="small",
        arm="int4",
        reference=False,
        checkpoint="w4a16",
        settings=Settings(chunk=64, threads=1),
        capture=audit.capture,
    )


def test_an_arm_that_is_not_there_is_refused_with_those_that_are(content):
    audit = parse_audit(content, where="audit.yaml")
    with pytest.raises(AuditError, match="expected: bf16, int4, eager-off"):
        arm_spec(audit, "int8")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), "colour"),
        (("prompts", "words"), "prompts.words.colour"),
        (("checkpoints", "base"), "checkpoints.base.colour"),
        (("checkpoints", "w4a16", "quantize"), "checkpoints.w4a16.quantize.colour"),
        (("arms", "int4"), "arms.int4.colour"),
        (("arms", "int4", "settings"), "arms.int4.settings.colour"),
        (("settings",), "arms.bf16.settings.colour"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place(content, path, place):
    section = content
    for key in path:
        section = section[key]
    section["colour"] = "red"
    assert f"found: {place}: Extra inputs are not permitted" in refusal_of(content)


@pytest.mark.parametrize("empty", [None, [], "text", 3])
def test_a_file_that_is_no_mapping_is_refused(empty):
    assert "the top level is not a mapping" in refusal_of(empty)


@pytest.mark.parametrize("name", ["Small", "", "-x", "a b", "a/b", "../a", "größe", "a\n"])
def test_a_name_that_is_no_file_name_everywhere_is_refused(content, name):
    content["name"] = name
    assert "a name has lower-case letters" in refusal_of(content)


def test_two_references_are_refused_by_name(content):
    content["arms"]["int4"]["reference"] = True
    assert "exactly one arm is the reference, found 2: ['bf16', 'int4']" in refusal_of(content)


def test_no_reference_is_refused(content):
    content["arms"]["bf16"]["reference"] = False
    assert "exactly one arm is the reference, found 0" in refusal_of(content)


def test_an_arm_of_a_missing_checkpoint_is_refused(content):
    content["arms"]["int4"]["checkpoint"] = "int3"
    assert "arm int4 names checkpoint int3, which the audit does not have" in refusal_of(content)


@pytest.mark.parametrize("base", ["nothing", "w4a16"])
def test_only_a_checkpoint_with_a_source_can_be_quantized(content, base):
    content["checkpoints"]["w4a16"]["quantize"]["base"] = base
    assert f"checkpoint w4a16 quantizes {base}, which has to be a checkpoint with a source" in refusal_of(content)


@pytest.mark.parametrize("section", ["prompts", "checkpoints", "arms"])
def test_a_section_with_nothing_in_it_is_refused(content, section):
    content[section] = {}
    assert section in refusal_of(content)


@pytest.mark.parametrize(
    ("checkpoint", "found"),
    [
        ({}, "give either source or quantize"),
        ({"source": "./a", "quantize": {"base": "base", "scheme": "W8A8-INT8"}}, "give either source or quantize"),
        ({"source": "hf:a/b"}, "an hf: source needs a revision"),
        ({"source": "hf:a/b", "revision": "main"}, "an hf: source needs a revision"),
        ({"source": "pypi:a==1"}, "a pypi: source needs sha256"),
        ({"source": "model"}, "source is ./FOLDER"),
        ({"quantize": {"base": "base", "scheme": "W4A16"}}, "scheme W4A16 needs a group_size"),
        ({"quantize": {"base": "base", "scheme": "W8A8-INT8", "group_size": 8}}, "scheme W8A8-INT8 is symmetric"),
        ({"quantize": {"base": "base", "scheme": "W8A8-INT8", "symmetric": False}}, "scheme W8A8-INT8 is symmetric"),
        ({"quantize": {"base": "base", "scheme": "W3"}}, "Input should be 'W8A8-INT8' or 'W4A16'"),
    ],
)
def test_a_checkpoint_that_cannot_be_is_refused(content, checkpoint, found):
    content["checkpoints"]["base2"] = checkpoint
    assert found in refusal_of(content)


@pytest.mark.parametrize(
    "checkpoint",
    [
        {"source": "/models/a"},
        {"source": "hf:a/b", "revision": "0123456789abcdef0123456789abcdef01234567"},
        {"source": "pypi:a==1", "sha256": "ab" * 32},
        {"quantize": {"base": "base", "scheme": "W8A8-INT8"}},
        {"quantize": {"base": "base", "scheme": "W4A16", "group_size": 128, "symmetric": False}},
    ],
)
def test_a_checkpoint_that_can_be_is_accepted(content, checkpoint):
    content["checkpoints"]["base2"] = checkpoint
    audit = parse_audit(content, where="audit.yaml")
    assert audit.checkpoints["base2"].model_dump(exclude_unset=True) == checkpoint


@pytest.mark.parametrize(
    ("setting", "value"),
    [("chunk", 0), ("dtype", "int8"), ("threads", "two"), ("max_model_len", -1), ("env", {"A": 1}), ("seed", 0.5)],
)
def test_a_setting_out_of_its_range_is_refused(content, setting, value):
    content["settings"][setting] = value
    assert f"arms.bf16.settings.{setting}" in refusal_of(content)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"settings": [1]}, "is not a mapping"),
        ({"arms": ["bf16"]}, "is not a mapping"),
        ({"arms": {"bf16": "base"}}, "arm bf16 is not a mapping"),
        ({"arms": {"bf16": {"settings": [1]}}}, "settings is not a mapping"),
    ],
)
def test_sections_of_the_wrong_kind_are_refused(content, change, found):
    assert found in refusal_of(content | change)


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    path = tmp_path / "audit.yaml"
    path.write_text("name: [a\narms: }", encoding="utf-8")
    with pytest.raises(AuditError, match="the audit file is not YAML"):
        read_audit(path)


def test_a_missing_audit_file_is_refused(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        read_audit(tmp_path / "audit.yaml")


def test_a_resolved_audit_written_and_read_again_is_equal(content, tmp_path):
    audit = parse_audit(content, where="audit.yaml")
    audit.write(tmp_path / "spec.json")
    assert Audit.read(tmp_path / "spec.json") == audit


@pytest.mark.parametrize("path", sorted([*ROOT.glob("config/audits/*.yaml"), ROOT / "tests/data/tiny.yaml"]), ids=str)
def test_a_shipped_audit_is_valid_and_fits_the_schema(path):
    read_audit(path)
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), audit_schema())


def test_the_schema_refuses_an_unknown_key(content):
    content["arms"]["int4"]["colour"] = "red"
    with pytest.raises(jsonschema.ValidationError, match="colour"):
        jsonschema.validate(content, audit_schema())


def test_the_schema_accepts_a_file_that_parses(content):
    jsonschema.validate(content, audit_schema())


def test_every_property_of_the_schema_says_what_it_is():
    undescribed = [
        f"{name}.{key}"
        for name, definition in audit_schema()["$defs"].items()
        for key, described in definition["properties"].items()
        if not described.get("description")
    ]
    assert undescribed == []


@pytest.mark.parametrize("empty", [[], 0, ""], ids=repr)
def test_settings_that_are_no_mapping_are_refused_even_if_they_are_empty(content, empty):
    assert "is not a mapping" in refusal_of(content | {"settings": empty})


@pytest.mark.parametrize("key", [{"schema_version": "1"}, {"parents": {"a": "b"}}], ids=repr)
def test_keys_of_records_that_the_schema_refuses_are_refused(content, key):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | key, audit_schema())
    refusal_of(content | key)


def test_two_arms_of_one_name_are_refused(content, tmp_path):
    text = yaml.safe_dump(content, sort_keys=False) + "  int4:\n    checkpoint: base\n"
    (tmp_path / "audit.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(AuditError, match="int4"):
        read_audit(tmp_path / "audit.yaml")


def test_an_arms_environment_comes_on_top_of_the_shared_one(content):
    content["settings"] = {"env": {"A": "1", "B": "1"}}
    name = next(iter(content["arms"]))
    content["arms"][name]["settings"] = {"env": {"B": "2"}}
    assert parse_audit(content, where="x").arms[name].settings.env == {"A": "1", "B": "2"}


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"A": "x\0y"}, {"": "1"}])
def test_a_variable_that_no_process_can_have_is_refused(content, env):
    content["settings"] = {"env": env}
    with pytest.raises(AuditError, match="environment variable"):
        parse_audit(content, where="x")


@pytest.mark.parametrize(
    "text", ["about: 2024-02-30", "a: !!int foo", "a: !!map [1]", 'a: "\\ud800"', "a: " + "[" * 3000]
)
def test_yaml_that_python_cannot_hold_is_one_message(tmp_path, text):
    (tmp_path / "audit.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(AuditError):
        read_audit(tmp_path / "audit.yaml")


def test_merge_keys_of_yaml_work_and_own_keys_win(tmp_path):
    text = "base: &base {chunk: 512, threads: 2}\nown: {<<: *base, threads: 1}\n"
    loaded = yaml.load(text, audit_module._StrictLoader)
    assert loaded["own"] == {"chunk": 512, "threads": 1}
