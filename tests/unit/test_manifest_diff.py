"""``kldaudit manifest diff``: nothing when equal, else a tree, and what of it the audit meant."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_manifest import arm, layer, published, python, small_manifest

from kldaudit.audit import Container, Settings
from kldaudit.manifest.diff import GROUPS, LEFT_OUT, ORDER, Difference, diff, matches
from kldaudit.manifest.meant import FOLLOWS, LOADS, diff_of_arms, differing_settings

COMMAND = str(Path(sys.executable).with_name("kldaudit"))


@pytest.fixture
def a():
    return small_manifest()


@pytest.fixture
def b():
    return small_manifest()


def said(difference):
    """Group, place, things and details of every line."""
    return [
        (group.name, line.place, line.things, line.kind, [(d.field, d.before, d.after) for d in line.details])
        for group in difference.groups
        for line in group.lines
    ]


def causes(difference):
    """Setting that each line follows from, by place and things."""
    return {
        " ".join([line.place, *line.things]): line.follows_from for group in difference.groups for line in group.lines
    }


def test_equal_manifests_have_no_difference(a, b):
    assert not diff(a, b)
    assert diff(a, b).groups == []


def test_the_names_of_the_run_are_no_difference(a, b):
    b |= {"audit": "other", "arm": "int8", "launch": 2, "capture": {}}
    b["parents"]["spec"] = "0" * 64
    assert not diff(a, b)


def test_time_temperature_and_names_of_containers_are_no_difference(a, b):
    b["kernels"][0]["share"] = 0.31
    b["gpu"][0]["temperature_c"] = 64
    b["container"]["id"] = "77aa"
    assert not diff(a, b)


def test_the_order_of_a_list_with_keys_is_no_difference(a, b):
    for things in (b["python_packages"], b["libraries"], b["kernels"], b["selected"]["linear"], b["asked"]):
        things.reverse()
    assert not diff(a, b)


def test_another_version_of_a_package_is_one_line(a, b):
    b["python_packages"][0] = python("torch", "2.14.0+cu130", "9")
    details = [("version", "2.13.0+cu130", "2.14.0+cu130"), ("record_sha256", "1" * 64, "9" * 64)]
    assert said(diff(a, b)) == [("libraries", "python_packages", ["torch"], "changed", details)]


def test_a_package_more_and_a_package_less_are_told_by_their_version(a, b):
    b["debian_packages"].pop()
    b["python_packages"].append(python("triton", "3.5.0", "8"))
    assert sorted(said(diff(a, b))) == [
        ("libraries", "debian_packages", ["libgomp1:amd64"], "removed", [("", "1:14.2-3", None)]),
        ("libraries", "python_packages", ["triton"], "added", [("", None, "3.5.0")]),
    ]


def test_two_packages_of_the_same_name_are_two(a, b):
    b["python_packages"].append(python("vllm", "0.31.0", "8"))
    assert said(diff(a, b)) == [("libraries", "python_packages", ["vllm #2"], "added", [("", None, "0.31.0")])]


def test_another_hash_of_a_loaded_library_is_told_by_its_path(a, b):
    b["libraries"][1]["sha256"] = "e" * 64
    assert said(diff(a, b)) == [
        ("libraries", "libraries", ["/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0"], "changed",
         [("sha256", "5" * 64, "e" * 64)])
    ]  # fmt: skip


def test_layers_that_changed_in_the_same_way_are_one_line_in_the_models_order(a, b):
    for manifest, backend in ((a, "FLASH_ATTN"), (b, "FLASHINFER")):
        manifest["selected"]["attention"] = [layer(number) | {"backend": backend} for number in range(12)]
    [(group, place, things, kind, details)] = said(diff(a, b))
    assert (group, place, kind) == ("kernels", "selected/attention", "changed")
    assert things == [f"model.layers.{number}.attn" for number in range(12)]
    assert details == [("backend", "FLASH_ATTN", "FLASHINFER")]


def test_a_layer_that_changed_otherwise_is_a_line_of_its_own(a, b):
    b["selected"]["attention"][0]["backend"] = "FLASHINFER"
    b["selected"]["attention"][1]["backend"] = "TRITON_ATTN"
    assert [things for _, _, things, _, _ in said(diff(a, b))] == [["model.layers.0.attn"], ["model.layers.1.attn"]]


def test_variables_that_changed_in_the_same_way_are_one_line(a, b):
    b["environment"] |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    [(group, place, things, _, details)] = said(diff(a, b))
    assert (group, place, sorted(things)) == ("settings", "environment", ["MKL_NUM_THREADS", "OMP_NUM_THREADS"])
    assert details == [("", "2", "1")]


def test_groups_stand_in_the_order_of_how_likely_they_change_the_numbers(a, b):
    b["environment"]["KMP_BLOCKTIME"] = "0"
    b["cpu"]["microcode"] = "0xb002117"
    b["stack"]["CUDA runtime"] = "13.1"
    b["kernels"][1]["count"] = 9
    b["engine"]["version"] = "0.33.0"
    b["weather"] = "rain"
    assert [group.name for group in diff(a, b).groups] == list(ORDER)
    assert set(ORDER) == {name for name, _ in GROUPS}


@pytest.mark.parametrize(
    ("path", "group"),
    [
        (("parents", "image"), "engine"),
        (("outcome",), "engine"),
        (("selected", "model_class"), "engine"),
        (("selected", "linear"), "kernels"),
        (("primitives",), "kernels"),
        (("stray_files",), "libraries"),
        (("container",), "hardware"),
        (("gpu",), "hardware"),
        (("parents", "checkpoint"), "settings"),
        (("parents", "prompt:words"), "settings"),
        (("selected", "chunk"), "settings"),
    ],
    ids="/".join,
)
def test_every_part_has_its_group(a, b, path, group):
    place = b
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "something else"
    assert [one.name for one in diff(a, b).groups] == [group]


def test_a_gpu_against_none_is_one_line(a, b):
    b["gpu"] = "none: torch sees no CUDA device"
    assert said(diff(a, b)) == [
        ("hardware", "gpu", [], "changed", [("", "1 entries", "none: torch sees no CUDA device")])
    ]


def test_an_empty_list_is_no_different_kind_of_thing(a, b):
    b["stray_files"] = []
    assert said(diff(a, b)) == [
        ("libraries", "stray_files", ["/opt/extra/libextra.so"], "removed", [("", "3" * 64, None)])
    ]


def test_what_an_earlier_version_did_not_record_is_said_once():
    a = published("smollm2-cpu-amx/captures/reference")
    b = json.loads(json.dumps(a))
    b["libraries"] = [{"path": "/lib/libc.so.6", "sha256": "1" * 64}]
    for one in b["python_packages"]:
        one["installer"] = f"pip of {one['name']}"
    b["kernels"] = [{"name": name, "count": number} for number, name in enumerate(b["kernels"])]
    assert said(diff(a, b)) == [
        ("kernels", "kernels", ["*"], "changed", [("count", "not recorded", "recorded")]),
        ("libraries", "python_packages", ["*"], "changed", [("installer", "not recorded", "recorded")]),
        ("libraries", "libraries", [], "changed", [("", "not recorded", "1 entries")]),
    ]


def test_a_swap_turns_added_into_removed(a, b):
    b["environment"]["KMP_BLOCKTIME"] = "0"
    assert said(diff(a, b))[0][3:] == ("added", [("", None, "0")])
    assert said(diff(b, a))[0][3:] == ("removed", [("", "0", None)])


def test_the_two_published_machines_differ_in_what_is_known_of_them():
    amx = published("smollm2-cpu-amx/captures/reference")
    avx2 = published("smollm2-cpu-avx2/captures/reference")
    lines = {(place, *things): details for _, place, things, _, details in said(diff(amx, avx2))}
    assert lines[("cpu/model",)] == [("", "Intel(R) Xeon(R) Processor", "AMD EPYC")]
    assert lines[("torch/cpu_capability",)] == [("", "AVX512", "AVX2")]
    assert lines[("libc",)] == [("", "glibc 2.39", "glibc 2.36")]


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_a_difference_is_empty_if_and_only_if_the_values_are_equal(one, other):
    a, b = {"torch": {"x": one}}, {"torch": {"x": other}}
    assert not diff(a, a)
    assert bool(diff(a, b)) == (json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True))


# Patterns


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        (("engine", "version"), "engine", True),
        (("engines",), "engine", False),
        (("engine",), "engine/version", False),
        (("engine", "config", "cache_config", "cache_dtype"), "engine/**/cache_dtype", True),
        (("engine", "cache_dtype"), "engine/**/cache_dtype", True),
        (("engine", "config", "kv_cache_dtype"), "engine/**/cache_dtype", False),
        (("libraries", "/lib/a/b.so", "sha256"), "libraries/*/sha256", True),
        (("parents", "prompt:words"), "parents/prompt:*", True),
        (("selected", "attention", "l", "kv_scales", "k"), "selected/attention/*/kv_*", True),
        (("a", "x.y"), "a/x?y", True),
        (("a", "xzy"), "a/x.y", False),
    ],
)
def test_a_pattern_matches_a_path_or_something_above_it(path, pattern, expected):
    assert matches(path, [pattern]) is expected


# Meant, and not meant


def test_every_setting_of_an_arm_has_its_consequences():
    settings = {name for name in Settings.model_fields if name != "env"}
    assert set(FOLLOWS) == settings | set(Container.model_fields) | {"checkpoint"}
    assert set(FOLLOWS) > LOADS


def test_arms_with_equal_settings_mean_nothing(a, b):
    b["environment"]["OMP_NUM_THREADS"] = "1"
    b["kernels"][0]["count"] = 3
    found = diff_of_arms(a, b, (arm(), arm("again")))
    assert set(causes(found).values()) == {None}
    assert found.part(meant=True) == []


def test_differing_settings_are_named():
    one = arm(threads=2, env={"A": "1", "B": "2"})
    other = arm("b", "int8", {"shm_gib": 4}, threads=1, env={"B": "3", "C": "4"})
    expected = ["checkpoint", "threads", "shm_gib", "env: A", "env: B", "env: C"]
    assert differing_settings(one, other) == expected


def test_threads_mean_their_variables_and_nothing_else(a, b):
    b["environment"] |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KMP_AFFINITY": "none"}
    b["selected"]["torch_threads"] = 1
    found = causes(diff_of_arms(a, b, (arm(threads=2), arm("threads-1", threads=1))))
    assert found == {
        "environment OMP_NUM_THREADS MKL_NUM_THREADS": "threads",
        "environment KMP_AFFINITY": None,
        "selected/torch_threads": "threads",
    }


def test_a_kv_cache_type_means_types_blocks_and_kernels_but_no_other_backend(a, b):
    for one in b["selected"]["attention"]:
        one |= {"kv_cache_dtype": "fp8_e4m3", "kv_cache_torch_dtype": "torch.uint8", "backend": "FLASHINFER"}
    b["selected"]["kv_cache_dtype"] = "fp8_e4m3"
    b["engine"]["arguments"]["kv_cache_dtype"] = "fp8_e4m3"
    b["engine"]["config"]["cache_config"] = {"cache_dtype": "fp8_e4m3", "num_gpu_blocks": 1024}
    b["kernels"][0]["name"] = "BatchPrefillWithPagedKVCache"
    found = diff_of_arms(a, b, (arm(), arm("kv-fp8", kv_cache_dtype="fp8_e4m3")))
    [group] = found.part(meant=False)
    [line] = group.lines
    assert (line.place, [detail.field for detail in line.details]) == ("selected/attention", ["backend"])
    assert {one for one in causes(found).values() if one} == {"kv_cache_dtype"}


def test_one_layers_meant_and_not_meant_fields_are_two_lines(a, b):
    for one in b["selected"]["attention"]:
        one |= {"kv_cache_dtype": "fp8_e4m3", "backend": "FLASHINFER"}
    found = diff_of_arms(a, b, (arm(), arm("kv-fp8", kv_cache_dtype="fp8_e4m3")))
    lines = {line.follows_from: line for group in found.groups for line in group.lines}
    assert [detail.field for detail in lines["kv_cache_dtype"].details] == ["kv_cache_dtype"]
    assert [detail.field for detail in lines[None].details] == ["backend"]
    assert len(lines[None].things) == len(lines["kv_cache_dtype"].things) == 2


def test_a_checkpoint_means_its_weights_and_kernels(a, b):
    b["parents"]["checkpoint"] = "0" * 64
    b["selected"]["quantization"] = "compressed-tensors"
    for one in b["selected"]["linear"]:
        one |= {"method": "CompressedTensorsLinearMethod", "scheme": "CompressedTensorsW8A8Int8"}
    b["kernels"][1]["name"] = "cutlass_scaled_mm"
    found = causes(diff_of_arms(a, b, (arm(), arm("int8", "int8"))))
    assert set(found.values()) == {"checkpoint"}


def test_another_content_of_the_same_checkpoint_is_not_meant(a, b):
    b["parents"]["checkpoint"] = "0" * 64
    assert causes(diff_of_arms(a, b, (arm(), arm("b", threads=1)))) == {"parents/checkpoint": None}


def test_a_library_more_may_be_meant_but_another_hash_never_is(a, b):
    extra = {"path": "/opt/flashinfer.so", "sha256": "9" * 64, "owner": "none", "as_packaged": None}
    b["libraries"].append(b["libraries"][0] | extra)
    b["libraries"][0] = b["libraries"][0] | {"sha256": "8" * 64}
    arms = (arm(), arm("flashinfer", attention_backend="FLASHINFER"))
    path = a["libraries"][0]["path"]
    assert causes(diff_of_arms(a, b, arms)) == {
        f"libraries {path}": None,
        "libraries /opt/flashinfer.so": "attention_backend",
    }


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("cpu", "microcode"), "0x1"), (("gpu", 0, "vbios"), "97"), (("stack", "driver"), "590"),
        (("stack", "CUDA runtime"), "13.1"), (("torch", "commit"), "def"), (("python",), "CPython 3.12.1"),
        (("engine", "version"), "0.33.0"), (("engine", "config", "scheduler_config", "policy"), "priority"),
        (("debian_packages", 0, "version"), "2.42-1"), (("environment", "VLLM_NO_USAGE_STATS"), "0"),
        (("parents", "image"), "0" * 64), (("kernel",), "Linux 6.13"),
    ],
)  # fmt: skip
def test_what_no_setting_asks_for_is_never_meant(a, b, place, value):
    inner = b
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    everything = arm(
        "all", "other", {"shm_gib": 4}, threads=1, chunk=512, kv_cache_dtype="fp8_e4m3", quantization="fp8",
        attention_backend="TRITON_ATTN", model_impl="transformers", enforce_eager=False, dtype="float16", seed=1,
        head_dtype="float32", max_model_len=4096, kv_cache_gib=2, allow_unsupported=True, env={"OTHER": "1"},
    )  # fmt: skip
    assert list(causes(diff_of_arms(a, b, (arm(), everything))).values()) == [None]


PUBLISHED_SETTINGS = {
    "chunk-512": {"chunk": 512},
    "kv-fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "threads-1": {"threads": 1},
    "transformers-impl": {"model_impl": "transformers"},
    "fp8-per-block": {"quantization": "fp8_per_block"},
    "w8a8-int8": {"checkpoint": "smollm2-w8a8-int8"},
    "w4a16": {"checkpoint": "smollm2-w4a16", "env": {"VLLM_CPU_INT4_W4A8": "0"}},
    "w4a8": {"checkpoint": "smollm2-w4a16"},
}


def of_published(machine, variant):
    reference, other = (published(f"{machine}/captures/{name}") for name in ("reference", variant))
    return diff_of_arms(reference, other, (arm(), arm(variant, **PUBLISHED_SETTINGS[variant])))


@pytest.mark.parametrize("variant", PUBLISHED_SETTINGS)
def test_the_published_variants_differ_in_what_the_audit_meant_only(variant):
    found = of_published("smollm2-cpu-amx", variant)
    assert found.part(meant=True)
    assert found.part(meant=False) == []


def test_a_refusal_is_not_meant_and_told_in_few_lines():
    found = of_published("smollm2-cpu-avx2", "kv-fp8").part(meant=False)
    assert {line.place: line.details[0].after for group in found for line in group.lines} == {
        "asked": "0 entries",
        "outcome": "refused: NotImplementedError: FP8 KV cache on CPU requires x86 with AVX-512 or AMX.",
        "selected": "0 entries",
    }


# The command


@pytest.fixture
def command(tmp_path):
    """Run ``kldaudit manifest diff`` on two manifests, piped: exit code, stdout, stderr."""

    def run(a, b, *options):
        for name, content in (("a.json", a), ("b.json", b)):
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text, encoding="utf-8")
        line = [COMMAND, "manifest", "diff", "a.json", "b.json", *map(str, options)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


def test_equal_manifests_print_nothing_and_exit_with_0(command, a, b):
    assert command(a, b) == (0, "", "")
    assert command(a, b, "--json") == (0, "", "")


def test_different_manifests_print_a_tree_and_exit_with_1(command, a, b):
    b["cpu"]["microcode"] = "0xb002117"
    b["libraries"][0]["sha256"] = "e" * 64
    code, out, err = command(a, b)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "a.json → b.json",
        "├── libraries",
        "│   └── libraries {environment}/lib/python3.11/site-packages/torch/lib/libtorch.so: "
        "sha256 444444444444… → eeeeeeeeeeee…",
        "└── hardware",
        "    └── cpu/microcode: 0xb002116 → 0xb002117",
    ]


def test_a_tree_in_a_pipe_has_no_colours_and_cuts_no_line(command, a, b):
    b["environment"]["LD_PRELOAD"] = "/a/long/path" * 12
    _, out, _ = command(a, b)
    assert "\x1b" not in out
    assert f"environment LD_PRELOAD: added {'/a/long/path' * 12}" in out


def test_markup_in_a_value_is_printed_as_it_is(command, a, b):
    b["environment"]["VLLM_X"] = "[bold]x[/bold]"
    assert "environment VLLM_X: added [bold]x[/bold]" in command(a, b)[1]


def test_of_long_lists_of_words_only_the_differing_ones_are_printed(command, a, b):
    flags = [f"flag{number}" for number in range(60)]
    a["cpu"]["isa_flags"] = " ".join(flags)
    b["cpu"]["isa_flags"] = " ".join([*flags[1:], "amx"])
    assert "cpu/isa_flags: -flag0 +amx" in command(a, b)[1]


def test_as_json_the_tree_is_whole(command, a, b):
    b["libraries"][0]["sha256"] = "e" * 64
    code, out, _ = command(a, b, "--json")
    assert code == 1
    assert Difference.model_validate_json(out) == diff(a, b)


def test_with_the_arms_what_was_not_meant_comes_first(command, tmp_path, a, b):
    arm().write(tmp_path / "one.json")
    arm("threads-1", threads=1).write(tmp_path / "other.json")
    b["environment"]["OMP_NUM_THREADS"] = "1"
    b["cpu"]["microcode"] = "0xb002117"
    code, out, _ = command(a, b, "--arms", "one.json", "other.json")
    assert code == 1
    assert out.splitlines()[1:] == [
        "├── not meant by the audit",
        "│   └── hardware",
        "│       └── cpu/microcode: 0xb002116 → 0xb002117",
        "└── meant by the audit",
        "    └── settings",
        "        └── environment OMP_NUM_THREADS: 2 → 1 [threads]",
    ]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"arm": "x"}', '{"python_packages": {}}'],
)
def test_what_is_no_manifest_is_bad_input(command, a, content):
    code, out, err = command(a, content)
    assert (code, out) == (2, "")
    assert err.startswith("kldaudit: b.json is no")
    assert err.count("\n  where: ") == err.count("\n  found: ") == err.count("\n  what to do: ") == 1


@pytest.mark.parametrize(
    ("place", "value"), [("python_packages", [{}]), ("kernels", 5), ("environment", {"A": 1}), ("selected", [])]
)
def test_a_manifest_with_a_field_of_another_type_is_bad_input(command, a, b, place, value):
    code, _, err = command(a, b | {place: value})
    assert code == 2
    assert f"found: {place}" in err


def test_a_missing_manifest_is_bad_input(tmp_path):
    line = [COMMAND, "manifest", "diff", "none.json", "none.json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot read none.json" in done.stderr


def test_the_manifest_of_a_crashed_engine_can_be_compared(a):
    crashed = {key: a[key] for key in ("schema_version", "parents", "audit", "arm", "launch")}
    crashed["outcome"] = "refused: the engine crashed with SIGSEGV: no last words"
    places = {place: details for _, place, _, _, details in said(diff(a, crashed))}
    assert places["outcome"] == [("", "captured", crashed["outcome"])]
    assert places["libraries"] == [("", "3 entries", "not recorded")]


def test_no_pattern_is_left_out_twice():
    assert len(LEFT_OUT) == len(set(LEFT_OUT))
