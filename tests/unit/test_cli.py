import json
import subprocess
import sys
from pathlib import Path

import h5py
import jsonschema
import numpy as np
import pytest
import yaml

import kldaudit
from kldaudit.audit import audit_schema
from kldaudit.capture_file import write_refusal
from kldaudit.cli import main
from kldaudit.divergence.step import Divergence
from kldaudit.verify import Verification

COMMAND = str(Path(sys.executable).with_name("kldaudit"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in this process: exit code, stdout, stderr. An exception that comes out is a traceback."""

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["kldaudit", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


def message_of(result, *contents):
    """The one message with which bad input ends: what, where, expected, found, what to do."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("kldaudit: ")
    assert err.endswith("\n")
    for part in ("where", "expected", "found", "what to do"):
        assert err.count(f"\n  {part}: ") == 1, err
    for content in contents:
        assert str(content) in err
    return err


def test_the_installed_command_says_its_version():
    done = subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{kldaudit.__version__}\n", "")


def test_the_installed_command_ends_bad_input_with_one_message(tmp_path):
    path = tmp_path / "a.h5"
    path.write_text("text", encoding="utf-8")
    done = subprocess.run([COMMAND, "verify", path, path], capture_output=True, text=True, check=False)
    message_of((done.returncode, done.stdout, done.stderr), path, "cannot open the capture")
    assert "Traceback" not in done.stderr


def test_the_installed_command_says_differs_with_exit_code_1(write_capture, logits):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits + 1)
    done = subprocess.run([COMMAND, "verify", a, b], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


# Audit files


@pytest.fixture
def audit():
    return {
        "name": "small",
        "prompts": {"words": {"file": "words.txt", "about": "a few words"}},
        "checkpoints": {"base": {"source": "./base"}},
        "arms": {
            "bf16": {"checkpoint": "base", "reference": True},
            "fp8": {"checkpoint": "base", "settings": {"quantization": "fp8"}},
        },
    }


@pytest.fixture
def audit_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(content):
        Path("audit.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        return "audit.yaml"

    return write


def test_check_says_that_an_audit_is_valid(run, audit, audit_file):
    code, out, err = run("check", audit_file(audit))
    assert (code, err) == (0, "")
    assert "audit.yaml is valid: audit small, reference bf16, variants fp8" in out
    assert "2 arms × 2 launches × 2 passes, every 32 tokens" in out


def test_an_unknown_key_is_bad_input(run, audit, audit_file):
    audit["arms"]["fp8"]["settings"]["colour"] = "red"
    message_of(run("check", audit_file(audit)), "where: audit.yaml", "arms.fp8.settings.colour")


def test_two_references_are_bad_input(run, audit, audit_file):
    audit["arms"]["fp8"]["reference"] = True
    message_of(run("check", audit_file(audit)), "where: audit.yaml", "found 2: ['bf16', 'fp8']")


def test_an_arm_of_a_missing_checkpoint_is_bad_input(run, audit, audit_file):
    audit["arms"]["fp8"]["checkpoint"] = "none"
    message_of(run("check", audit_file(audit)), "where: audit.yaml", "arm fp8 names checkpoint none")


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "- a\n- b\n", "name: [", "name: 'x", "\t", "a: b: c", "\x00"], ids=repr
)
def test_a_file_that_is_no_audit_is_bad_input(run, tmp_path, content):
    path = tmp_path / "audit.yaml"
    path.write_text(content, encoding="utf-8")
    message_of(run("check", path), f"where: {path}")


def test_an_audit_file_in_another_encoding_is_bad_input(run, tmp_path):
    path = tmp_path / "audit.yaml"
    path.write_bytes("name: größe".encode("latin-1"))
    message_of(run("check", path), f"where: {path}", "a readable UTF-8 text file")


def test_a_missing_audit_file_is_bad_input(run, tmp_path):
    message_of(run("check", tmp_path / "audit.yaml"), tmp_path / "audit.yaml", "No such file")


def test_a_folder_is_no_audit_file(run, tmp_path):
    message_of(run("check", tmp_path), tmp_path)


def test_spec_resolves_one_arm(run, audit, audit_file, tmp_path):
    assert run("spec", "--audit", audit_file(audit), "--arm", "fp8", "--output", "fp8.json")[0] == 0
    content = json.loads((tmp_path / "fp8.json").read_text(encoding="utf-8"))
    assert (content["arm"], content["settings"]["quantization"]) == ("fp8", "fp8")


def test_an_arm_that_the_audit_does_not_have_is_bad_input(run, audit, audit_file):
    result = run("spec", "--audit", audit_file(audit), "--arm", "int4", "--output", "spec.json")
    message_of(result, "found: int4", "expected: bf16, fp8")
    assert not Path("spec.json").exists()


def test_schema_writes_the_schema_of_audit_files(run, tmp_path):
    assert run("schema", "--output", tmp_path / "schema.json")[0] == 0
    assert json.loads((tmp_path / "schema.json").read_text(encoding="utf-8")) == audit_schema()


def test_the_schema_of_something_else_is_bad_input(run, tmp_path):
    code, _, err = run("schema", "--of", "weather", "--output", tmp_path / "schema.json")
    assert code == 2
    assert "weather is none of audit" in err


# Captures that are none


def empty(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("not HDF5\n", encoding="utf-8")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def missing(path):
    path.unlink()


def incomplete(path):
    with h5py.File(path, "r+") as file:
        del file.attrs["complete"]


def of_another_shape(path):
    with h5py.File(path, "r+") as file:
        file.attrs["vocab_size"] = 63


def another_hdf5_file(path):
    with h5py.File(path, "w") as file:
        file["x"] = 1


def of_a_later_version(path):
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = "2.0"


def refused(path):
    write_refusal(path, {"audit": "test", "arm": "int8", "launch": 1}, "no such kernel")


UNREADABLE = [empty, text, truncated, missing]
WRONG = [incomplete, of_another_shape, another_hdf5_file, of_a_later_version]


@pytest.fixture
def captures(write_capture, logits):
    return write_capture("good.h5", logits), write_capture("bad.h5", logits)


@pytest.mark.parametrize("damage", [*UNREADABLE, *WRONG, refused])
@pytest.mark.parametrize("command", ["verify", "divergence"])
def test_a_first_capture_that_is_none_is_bad_input(run, captures, command, damage):
    good, bad = captures
    damage(bad)
    message_of(run(command, bad, good), bad)


@pytest.mark.parametrize("damage", [*UNREADABLE, *WRONG, refused])
def test_a_second_capture_to_verify_that_is_none_is_bad_input(run, captures, damage):
    good, bad = captures
    damage(bad)
    message_of(run("verify", good, bad), bad)


@pytest.mark.parametrize("damage", [*UNREADABLE, *WRONG])
def test_a_variant_that_is_none_is_bad_input(run, captures, damage):
    good, bad = captures
    damage(bad)
    message_of(run("divergence", good, bad), bad)


@pytest.mark.parametrize("damage", [*UNREADABLE, *WRONG])
def test_a_launch_of_an_arm_that_is_none_is_bad_input(run, captures, damage, tmp_path):
    _, bad = captures
    damage(bad)
    message_of(run("verify", bad, "--output", tmp_path / "verification.json"), bad)
    assert not (tmp_path / "verification.json").exists()


@pytest.mark.parametrize("damage", [*UNREADABLE, *WRONG, refused])
def test_a_second_launch_that_is_none_is_bad_input(run, captures, damage):
    good, bad = captures
    damage(bad)
    message_of(run("divergence", good, good, "--second-launch", bad), bad)


@pytest.mark.parametrize("command", ["verify", "divergence"])
def test_captures_of_different_prompts_are_bad_input(run, write_capture, logits, command):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", {"calls": logits})
    message_of(run(command, a, b), a, b, "differ in their prompts")


@pytest.mark.parametrize("command", ["verify", "divergence"])
def test_captures_of_different_vocabularies_are_bad_input(run, write_capture, logits, command):
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits[:, :32])
    message_of(run(command, a, b), a, b, "expected: 64", "found: 32")


@pytest.mark.parametrize(
    ("values", "found"), [(np.nan, "found: NaN"), (np.inf, "found: +inf"), (np.full(64, -np.inf), "found: only -inf")]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_logits_that_are_no_distribution_are_bad_input(run, write_capture, logits, values, found, dtype):
    broken = logits.copy()
    if np.ndim(values):
        broken[3] = values
    else:
        broken[3, 7] = values
    a, b = write_capture("a.h5", logits, dtype=dtype), write_capture("b.h5", broken, dtype=dtype)
    message_of(run("divergence", a, b), f"where: {b}, prompt words, position 15", found)


def test_a_damaged_capture_is_bad_input(run, write_capture, logits):
    path = write_capture("a.h5", logits)
    with h5py.File(path, "r+") as file:
        file["prompts/words/row_digest"][0, 2] += np.uint64(1)
    message_of(run("verify", path, path), f"where: {path}, prompt words, row 2")


@pytest.mark.parametrize("content", ["{}", "[1]", '{"prompt": "words"}'])
def test_a_prompt_record_that_is_none_is_bad_input(run, captures, tmp_path, content):
    (tmp_path / "prompt.json").write_text(content, encoding="utf-8")
    message_of(run("divergence", captures[0], captures[1], "--prompt", tmp_path / "prompt.json"), "prompt.json")


@pytest.mark.parametrize("content", ["", "{", "words"])
def test_a_prompt_record_that_is_no_json_is_bad_input(run, captures, tmp_path, content):
    (tmp_path / "prompt.json").write_text(content, encoding="utf-8")
    message_of(run("divergence", captures[0], captures[1], "--prompt", tmp_path / "prompt.json"), "prompt.json")


def test_a_capture_without_positions_is_bad_input(run, write_capture, logits):
    path = write_capture("a.h5", logits)
    with h5py.File(path, "r+") as file:
        group = file["prompts/words"]
        for name, shape, dtype in (("positions", (0,), "i8"), ("logits", (0, 64), "f2"), ("row_digest", (1, 0), "u8")):
            del group[name]
            group.create_dataset(name, shape, dtype)
    message_of(run("divergence", path, path))


# Verify


def test_verify_says_identical_with_exit_code_0(run, write_capture, logits):
    code, out, err = run("verify", write_capture("a.h5", logits), write_capture("b.h5", logits))
    assert (code, out, err) == (0, "words: identical, 12 positions; layers not compared\n", "")


def test_verify_says_where_captures_differ_with_exit_code_1(run, write_capture, bits_of, logits):
    bits = bits_of(logits, "bfloat16")
    changed = bits.copy()
    changed[[4, 9], 0] += 3
    layers = np.zeros((1, 2, 12), np.uint64)
    other = layers.copy()
    other[0, 1, 4] = 1
    a, b = write_capture("a.h5", bits, layers=layers), write_capture("b.h5", changed, layers=other)
    code, out, err = run("verify", a, b)
    assert (code, err) == (1, "")
    assert out == "words: 2 of 12 positions differ, first at 19, first layer layers.1 at 19, at most 3 ULP\n"


def test_verify_says_if_no_layers_were_recorded(run, write_capture, logits):
    code, out, _ = run("verify", write_capture("a.h5", logits), write_capture("b.h5", logits + 1))
    assert code == 1
    assert "first layer not compared" in out


@pytest.mark.parametrize("count", [1, 3])
def test_verify_without_output_takes_two_captures(run, captures, count):
    code, _, err = run("verify", *[captures[0]] * count)
    assert code == 2
    assert f"give two captures, not {count}" in err


def test_verify_with_output_writes_the_arms_record_and_exits_0_whatever_it_says(run, write_capture, logits, tmp_path):
    a, b = write_capture("launch1.h5", logits), write_capture("launch2.h5", logits + 1, launch=2)
    code, _, _ = run("verify", a, b, "--output", tmp_path / "verification.json")
    assert code == 0
    assert Verification.read(tmp_path / "verification.json").outcome == "differs"


def test_verify_with_output_writes_down_a_refusal(run, tmp_path):
    refused(tmp_path / "launch1.h5")
    code, _, _ = run("verify", tmp_path / "launch1.h5", "--output", tmp_path / "verification.json")
    assert code == 0
    assert Verification.read(tmp_path / "verification.json").reason == "no such kernel"


# Divergence


@pytest.fixture
def two_tokens(write_capture):
    """Twelve positions of P = (3/4, 1/4) and of Q = (1/2, 1/2), in FP32."""
    p = np.tile([np.log(3), 0], (12, 1))
    reference = write_capture("a.h5", p, dtype="float32")
    return reference, write_capture("b.h5", np.zeros((12, 2)), dtype="float32", arm="int4")


def test_divergence_prints_the_figure(run, two_tokens):
    code, out, err = run("divergence", *two_tokens)
    expected = 3 / 4 * np.log(3 / 2) + 1 / 4 * np.log(1 / 2)
    assert (code, err) == (0, "")
    assert f"mean KL(reference‖int4) = {expected:.6g} nats, 0 of 12 greedy tokens flipped" in out


def test_divergence_writes_the_record(run, two_tokens, tmp_path):
    code, out, _ = run("divergence", *two_tokens, "--output", tmp_path / "d.json", "--positions", tmp_path / "d.h5")
    assert (code, out) == (0, "")
    assert Divergence.read(tmp_path / "d.json").overall.positions == 12
    assert h5py.is_hdf5(tmp_path / "d.h5")


def test_divergence_takes_windows_and_bootstrap_from_the_audit(run, two_tokens, audit, audit_file, tmp_path):
    audit["divergence"] = {"window_tokens": 16, "min_windows": 3, "bootstrap_resamples": 123}
    arguments = ("--audit", audit_file(audit), "--output", tmp_path / "d.json")
    assert run("divergence", *two_tokens, *arguments)[0] == 0
    interval = Divergence.read(tmp_path / "d.json").interval
    assert (interval.blocks, interval.resamples) == (3, 123)


def test_divergence_warns_of_an_output_that_is_chance(run, write_capture):
    logits = np.random.default_rng(8).normal(0, 4, (100, 64))
    a, b = write_capture("a.h5", logits), write_capture("b.h5", np.roll(logits, 1, axis=0))
    _, out, _ = run("divergence", a, b)
    assert "WARNING: the agreement is that of chance" in " ".join(out.split())


def test_divergence_of_a_refused_variant_says_why(run, captures):
    good, bad = captures
    refused(bad)
    assert run("divergence", good, bad) == (0, "int8: refused: no such kernel\n", "")


@pytest.mark.parametrize("reason", ["1 error [type=value_error]", "not found in [/usr/lib]"])
def test_a_reason_with_brackets_is_printed_as_it_is(run, captures, reason):
    good, bad = captures
    write_refusal(bad, {"audit": "test", "arm": "int8", "launch": 1}, reason)
    assert run("divergence", good, bad) == (0, f"int8: refused: {reason}\n", "")


# Disclosure


def test_schema_writes_the_schema_of_the_sheet(run, tmp_path):
    assert run("schema", "--of", "disclosure", "--output", tmp_path / "schema.json")[0] == 0
    assert json.loads((tmp_path / "schema.json").read_text(encoding="utf-8"))["title"] == "Disclosure"


def test_a_folder_without_results_is_bad_input(run, tmp_path):
    message_of(run("disclosure", "--results", tmp_path), tmp_path / "spec.json")


@pytest.mark.parametrize("arguments", [["nonsense"], ["verify", "--colour", "red"], ["check"], ["divergence", "a.h5"]])
def test_a_command_line_that_is_none_exits_with_2(run, arguments):
    code, _, err = run(*arguments)
    assert code == 2
    assert "Usage: kldaudit" in err


@pytest.mark.parametrize(
    ("of", "committed"),
    [("audit", "config/schema.json")]
    + [(of, f"manifests/schemas/{of}.schema.json") for of in ("disclosure", "image", "manifest")],
)
def test_the_committed_schema_is_in_step_with_the_code(run, tmp_path, of, committed):
    run("schema", "--of", of, "--output", tmp_path / "schema.json")
    root = Path(__file__).parents[2]
    assert (tmp_path / "schema.json").read_text(encoding="utf-8") == (root / committed).read_text(encoding="utf-8")


@pytest.mark.parametrize("audit", ["config/audits/smollm2-cpu.yaml", "tests/data/tiny.yaml"])
def test_the_projects_own_audits_fit_the_committed_schema(audit):
    root = Path(__file__).parents[2]
    schema = json.loads((root / "config/schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(yaml.safe_load((root / audit).read_text(encoding="utf-8")), schema)


@pytest.mark.parametrize("option", ["--output", "--positions"])
def test_an_output_that_is_an_input_is_refused_and_the_input_kept(run, write_capture, option):
    logits = np.random.default_rng(3).normal(0, 3, (12, 64))
    a, b = write_capture("a.h5", logits), write_capture("b.h5", logits * 1.1, arm="int8")
    before = a.read_bytes()
    code, _, err = run("divergence", a, b, option, a)
    assert code == 2
    assert "would be overwritten" in err
    assert a.read_bytes() == before


def test_a_folder_with_other_things_is_not_cleared_for_an_environment(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    (tmp_path / "lock.txt").write_text("")
    code, _, err = run(
        "image", "build", "--engine", "vllm-cpu", "--lock", tmp_path / "lock.txt", "--location", tmp_path / "home",
        "--source", tmp_path, "--output", tmp_path / "image.json", "--log", tmp_path / "log",
    )  # fmt: skip
    assert code == 2
    assert "a folder with other things in it" in err
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
