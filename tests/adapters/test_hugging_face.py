"""The adapter of Hugging Face folders, on what transformers wrote, and on every fault that such folders are known for.

Faults are made in memory on a healthy folder and judged end to end; each has the healthy folder as its twin.
"""

import hashlib
import io
import json
import struct

import numpy as np
import pytest

from auditor.adapters.adapter import Declined, Folder, Match, Options
from auditor.adapters.hugging_face.adapter import HuggingFace
from auditor.adapters.hugging_face.config import MAX_LAYERS, implied
from auditor.adapters.hugging_face.tensors import model_order
from auditor.adapters.registry import recognise
from auditor.audit import audit
from auditor.model.catalog import FileState, Role
from auditor.model.finding import Outcome, Severity
from auditor.settings import DEFAULTS, Level, Settings
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import LocalStore
from auditor.storage.memory import MemoryStore
from auditor.testing.adapter_contract import AdapterContract
from auditor.verdict import ExitCode, exit_code
from tests.paths import HEALTHY, ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "hugging_face"
TRAINER = FIXTURES / "trainer"
FOLDERS = [path.parent for path in sorted(FIXTURES.rglob("config.json"))]
ADAPTER = HuggingFace()
INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


class TestContract(AdapterContract):
    adapter = ADAPTER
    checkpoints = tuple(FOLDERS)
    foreign = (HEALTHY, HEALTHY / "global_step10")

    def framework_arrays(self, path):
        """Every tensor, by safetensors' own reader or torch.load."""
        torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors")
        tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            with safetensors.safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        for file in sorted(path.glob("pytorch_model*.bin")):
            tensors |= torch.load(file, weights_only=True)
        return {
            ("parameter", name): tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in tensors.items()
        }


# Making folders and faults


def objects_of(name):
    return {path.name: path.read_bytes() for path in (FIXTURES / name).iterdir() if path.is_file()}


def unpacked(content):
    """Header and data of a safetensors file."""
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    return {
        name: (said["dtype"], said["shape"], content[8 + length :][slice(*said["data_offsets"])])
        for name, said in header.items()
        if name != "__metadata__"
    }


def packed(tensors):
    header, data = {}, b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def changed(objects, file, change):
    """``objects`` with the tensors of one file changed in place."""
    tensors = unpacked(objects[file])
    change(tensors)
    return {**objects, file: packed(tensors)}


def with_json(objects, file, change):
    content = json.loads(objects[file])
    change(content)
    return {**objects, file: json.dumps(content).encode()}


def without(objects, *names):
    return {name: content for name, content in objects.items() if name not in names}


def report_on(objects, settings=DEFAULTS):
    report = audit(objects if hasattr(objects, "open") else MemoryStore(objects), settings, now=1e11)
    (run,) = report.runs
    return report, run


def found(objects):
    """Finding id to (consequences, places), a place being (file, tensor)."""
    _, run = report_on(objects)
    return {
        finding.id: (finding.consequences, [(place.file, place.tensor) for place in finding.locations])
        for finding in run.findings
    }


def undetermined(run):
    return {identifier: reason for identifier, reason in run.undetermined()}  # noqa: C416


def read(store, **options):
    folder = Folder.read(store, "")
    match = ADAPTER.recognise(store, folder)
    assert isinstance(match, Match), match
    return ADAPTER.read(store, folder, match, Options(**options))


LLAMA = objects_of("llama_sharded")
TIED = objects_of("mistral_tied")
QWEN = objects_of("qwen2")
TORCH = objects_of("gpt2_torch_sharded")
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


# Healthy folders are silent


@pytest.mark.parametrize("folder", [path.name for path in FOLDERS if path.parent == FIXTURES])
def test_healthy_folder_is_silent_and_nothing_is_left_open(folder):
    report, run = report_on(objects_of(folder))
    assert not run.findings
    assert not run.undetermined()
    assert exit_code(report) is ExitCode.HOLDS
    for identifier in ("INT001", "INT002", "INT009", "COV001", "COV002", "COV003", "MET002", "MET003", "NUM001"):
        assert run.counts(identifier)[Outcome.HOLDS] > 0, identifier
    assert run.last_good.step == 0


def test_trainer_run_is_silent_and_ordered_by_recorded_step():
    report, run = report_on(LocalStore(TRAINER))
    assert [step.state.step for step in run.steps] == [3, 6]
    assert not run.findings
    assert not run.undetermined()
    assert run.last_good.path == "checkpoint-6"
    assert exit_code(report) is ExitCode.HOLDS


def test_nan_in_logs_is_legal_and_nan_in_weights_is_found():
    objects = {f"checkpoint-3/{name}": content for name, content in objects_of("trainer/checkpoint-3").items()}
    state = "checkpoint-3/trainer_state.json"
    noisy = with_json(objects, state, lambda content: content["log_history"][0].update(grad_norm=float("nan")))
    assert b"NaN" in noisy[state]
    assert found(noisy) == {}
    spoilt = changed(objects, f"checkpoint-3/{SINGLE}", lambda t: t.update({NORM: ("F32", [16], b"\xff" * 64)}))
    assert list(found(spoilt)) == ["NUM001"]


@pytest.mark.parametrize(
    "change",
    [
        lambda o: {**o, "pytorch_model.bin": b"never looked at"},
        lambda o: {**o, "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}'},
        lambda o: {**o, "tokenizer.json": b"{}", "README.md": b"", "modeling_x.py": b""},
        lambda o: with_json(o, INDEX, lambda content: content.pop("metadata")),
        lambda o: with_json(o, INDEX, lambda content: content["metadata"].pop("total_size")),
        lambda o: with_json(
            o, INDEX, lambda content: content["metadata"].update(total_size=float(content["metadata"]["total_size"]))
        ),
        lambda o: with_json(o, CONFIG, lambda content: content.update(torch_dtype=content.pop("dtype"))),
        lambda o: with_json(o, CONFIG, lambda content: content.pop("tie_word_embeddings")),
    ],
)
def test_legal_variants_are_silent(change):
    assert found(change(LLAMA)) == {}


def test_tied_head_may_be_absent_or_there():
    assert "lm_head.weight" not in unpacked(TIED[SINGLE])
    assert found(TIED) == {}
    embedding = unpacked(TIED[SINGLE])["model.embed_tokens.weight"]
    assert found(changed(TIED, SINGLE, lambda t: t.update({"lm_head.weight": embedding}))) == {}
    untied = with_json(TIED, CONFIG, lambda content: content.update(tie_word_embeddings=False))
    assert found(untied) == {"COV003": ((), [(SINGLE, "lm_head.weight")])}


def test_older_spellings_are_known():
    def rename(objects, *pairs):
        def change(tensors):
            for name in list(tensors):
                new = name
                for one, other in pairs:
                    new = new.replace(one, other)
                tensors[new] = tensors.pop(name)

        return changed(objects, SINGLE, change)

    bert = objects_of("bert_masked")
    assert found(rename(bert, ("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))) == {}
    assert found(rename(objects_of("gpt2_tied"), ("transformer.", ""))) == {}
    assert found(rename(objects_of("gpt_neox"), ("embed_out.", "lm_head."))) == {}
    mask = ("F32", [1, 1, 8, 8], bytes(256))
    assert found(changed(objects_of("gpt2_tied"), SINGLE, lambda t: t.update({"h.0.attn.bias": mask}))) == {}


# What is not known is undetermined, never a finding


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(architectures=["PhilForCausalLM"]), "PhilForCausalLM"),
        (lambda content: content.pop("architectures"), "names no architecture"),
        (lambda content: content.pop("hidden_size"), "records no possible hidden_size"),
        (lambda content: content.update(num_hidden_layers=-1), "records no possible num_hidden_layers"),
        (lambda content: content.update(num_hidden_layers=MAX_LAYERS + 1), "records no possible num_hidden_layers"),
        (lambda content: content.update(intermediate_size=1 << 24, hidden_size=1 << 24), "beyond any model"),
        (lambda content: content.update(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_unknown_models_are_undetermined(change, words):
    spoilt = changed(with_json(QWEN, CONFIG, change), SINGLE, lambda t: t.pop(DOWN))
    report, run = report_on(spoilt)
    assert not run.findings
    assert list(undetermined(run)) == ["MET003"]
    assert words in undetermined(run)["MET003"]
    assert run.counts("COV003")[Outcome.NOT_APPLICABLE] == 1
    assert run.last_good.step == 0
    assert exit_code(report) is ExitCode.HOLDS


def test_folder_without_a_configuration_is_undetermined():
    _, run = report_on(without(QWEN, CONFIG))
    assert not run.findings
    assert "there is no config.json" in undetermined(run)["MET003"]


def test_dtype_that_is_not_known_is_counted_and_the_rest_is_judged():
    objects = changed(QWEN, SINGLE, lambda t: t.update({NORM: ("F6_E3M2", [16], bytes(12))}))
    _, run = report_on(objects)
    assert not run.findings
    assert run.steps[0].opaque == {"safetensors dtype F6_E3M2": 1}


# Files


def test_missing_file_is_one_finding_that_explains_its_tensors():
    assert found(without(LLAMA, SHARDS[1])) == {"INT004": (("COV001", "INT001"), [(SHARDS[1], "")])}
    catalog = read(MemoryStore(without(LLAMA, SHARDS[1])))
    lost = {
        catalog.tensors[piece.tensor].name for piece in catalog.pieces if catalog.file_of(piece.index).name == SHARDS[1]
    }
    assert lost == set(unpacked(LLAMA[SHARDS[1]]))


def test_missing_file_of_an_unknown_model_is_one_finding_too():
    assert found(without(LLAMA, SHARDS[1], CONFIG)) == {"INT004": (("INT001", "MET002"), [(SHARDS[1], "")])}


def test_missing_index_and_file():
    assert found(without(LLAMA, INDEX)) == {"INT004": (("INT001",), [(INDEX, "")])}
    both = found(without(LLAMA, INDEX, SHARDS[2]))
    assert both == {"INT004": (("COV001", "INT001"), [(SHARDS[2], ""), (INDEX, "")])}
    three = found(without(LLAMA, INDEX, SHARDS[1], SHARDS[2]))
    assert three == {"INT004": (("COV003", "INT001"), [(SHARDS[1], ""), (SHARDS[2], ""), (INDEX, "")])}


@pytest.mark.parametrize("spoil", [lambda c: c[:-10], lambda c: c[: len(c) // 2], lambda c: c + bytes(16)])
def test_short_and_long_files_are_damaged_and_their_tensors_known(spoil):
    objects = {**LLAMA, SHARDS[0]: spoil(LLAMA[SHARDS[0]])}
    assert found(objects) == {"INT002": (("COV001",), [(SHARDS[0], "")])}
    assert len(read(MemoryStore(objects)).tensors) == 21


def test_file_without_its_header_is_damaged_and_its_tensors_known_from_the_configuration():
    assert found({**QWEN, SINGLE: b""}) == {"INT002": (("COV001",), [(SINGLE, "")])}
    assert len(read(MemoryStore({**QWEN, SINGLE: b""})).tensors) == 27
    entry = json.dumps({"a": {"dtype": "", "shape": [], "data_offsets": [0, 0]}}).encode()
    objects = {**QWEN, SINGLE: struct.pack("<Q", len(entry)) + entry}
    assert list(found(objects)) == ["INT002"]


def test_small_files_may_be_damaged():
    for name in (CONFIG, INDEX):
        assert list(found({**LLAMA, name: LLAMA[name][:50]})) == ["INT002"], name
    _, run = report_on({**LLAMA, CONFIG: b"[]"})
    assert "config.json can't be read" in undetermined(run)["MET003"]


def test_torn_trainer_folder_lacks_its_last_file():
    folder = objects_of("trainer/checkpoint-6")
    torn = {f"checkpoint-6/{name}": content for name, content in without(folder, "trainer_state.json").items()}
    _, run = report_on(torn)
    assert [finding.id for finding in run.findings] == ["INT004"]
    assert run.findings[0].locations[0].file == "checkpoint-6/trainer_state.json"
    assert run.steps[0].state.step == 6
    assert run.last_good is None
    exported = {name: content for name, content in torn.items() if "optimizer" not in name}
    assert found(exported) == {}


def test_what_storage_denies_is_no_finding():
    for name in (SHARDS[1], INDEX, CONFIG):
        report, run = report_on(FaultyStore(MemoryStore(LLAMA), Faults(denied=name)))
        assert not run.findings, name
        assert exit_code(report) is ExitCode.INCOMPLETE, name
        assert run.last_good is None, name


# Leftovers of another save


def test_files_that_the_index_does_not_name_are_leftovers():
    other = "model-00002-of-00004.safetensors"
    assert found({**LLAMA, other: LLAMA[SHARDS[1]]}) == {"INT009": ((), [(other, "")])}
    nine = {**LLAMA, **{f"model-0000{n}-of-00009.safetensors": b"" for n in (6, 7)}}
    assert [place for place, _ in found(nine)["INT009"][1]] == [f"model-0000{n}-of-00009.safetensors" for n in (6, 7)]


def test_index_that_names_only_part_of_the_files_is_one_finding():
    def forget(content):
        content["weight_map"] = {name: file for name, file in content["weight_map"].items() if file != SHARDS[2]}

    objects = with_json(LLAMA, INDEX, forget)
    assert found(objects) == {"INT009": (("COV003",), [(SHARDS[2], "")])}


def test_two_families_without_an_index():
    other = "model-00001-of-00002.safetensors"
    result = found({**without(LLAMA, INDEX), other: LLAMA[SHARDS[0]]})
    assert result == {"INT004": (("INT001",), [(INDEX, "")]), "INT009": ((), [(other, "")])}


def test_older_single_file_beside_a_whole_set():
    assert found({**LLAMA, SINGLE: QWEN[SINGLE]}) == {"INT009": ((), [(SINGLE, "")])}


def test_older_index_beside_a_newer_single_file():
    assert found({**TIED, INDEX: LLAMA[INDEX]}) == {"INT009": ((), [(INDEX, "")])}
    assert found({**TIED, SHARDS[0]: LLAMA[SHARDS[0]]}) == {"INT009": ((), [(SHARDS[0], "")])}


def test_two_families_of_the_kind_that_is_not_taken():
    extra = {"pytorch_model-00001-of-00002.bin": b"", "pytorch_model-00001-of-00003.bin": b""}
    assert list(found({**LLAMA, **extra})) == ["INT009"]
    assert found({**LLAMA, "pytorch_model-00001-of-00002.bin": b""}) == {}


# Index against headers


def test_tensor_that_the_index_places_elsewhere():
    moved = unpacked(LLAMA[SHARDS[2]])
    name, tensor = moved.popitem()
    objects = changed({**LLAMA, SHARDS[2]: packed(moved)}, SHARDS[0], lambda t: t.update({name: tensor}))
    assert found(objects) == {"MET002": ((), [(SHARDS[0], name)])}


def test_tensor_that_the_index_names_and_no_file_holds():
    name = next(iter(unpacked(LLAMA[SHARDS[2]])))
    gone = changed(LLAMA, SHARDS[2], lambda t: t.pop(name))
    assert found(gone) == {"COV003": ((), [(SHARDS[2], name)])}
    assert found(without(gone, CONFIG)) == {"COV003": ((), [(SHARDS[2], name)])}
    extra = with_json(LLAMA, INDEX, lambda content: content["weight_map"].update({"mtp.fc.weight": SHARDS[1]}))
    assert found(extra) == {"COV003": ((), [(SHARDS[1], "mtp.fc.weight")])}


def test_tensor_that_the_index_does_not_name():
    name = next(iter(unpacked(LLAMA[SHARDS[2]])))
    objects = with_json(LLAMA, INDEX, lambda content: content["weight_map"].pop(name))
    assert found(objects) == {"MET002": ((), [(SHARDS[2], name)])}


def test_tensor_that_two_files_hold():
    name, tensor = next(iter(unpacked(LLAMA[SHARDS[2]]).items()))
    objects = changed(LLAMA, SHARDS[0], lambda t: t.update({name: tensor}))
    assert found(objects) == {"MET002": ((), [(SHARDS[0], name)])}


@pytest.mark.parametrize("size", [0, 1, 10**30, 1.5, float("nan")])
def test_recorded_total_that_is_wrong(size):
    objects = with_json(LLAMA, INDEX, lambda content: content["metadata"].update(total_size=size))
    assert found(objects) == {"MET002": ((), [(INDEX, "")])}


def test_a_wrong_total_is_a_warning_and_softens_no_error():
    """No loader looks at it."""
    objects = with_json(LLAMA, INDEX, lambda content: content["metadata"].update(total_size=5))
    report = audit(MemoryStore(objects))
    (finding,) = report.runs[0].findings
    assert (finding.severity, exit_code(report)) == (Severity.WARNING, ExitCode.HOLDS)
    assert "records total_size 5, the tensors have" in finding.message
    lost = with_json(LLAMA, INDEX, lambda content: content["weight_map"].pop(next(iter(content["weight_map"]))))
    (finding,) = audit(MemoryStore(lost)).runs[0].findings
    assert (finding.id, finding.severity) == ("MET002", Severity.ERROR)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b", "", 7, None, ["x"], "a\0b"])
def test_index_may_not_lead_out_of_the_folder(name):
    objects = with_json(LLAMA, INDEX, lambda content: content["weight_map"].update(evil=name))
    assert found(objects) == {"MET002": ((), [(INDEX, "evil")])}


def test_index_of_torch_files():
    assert found(without(TORCH, "pytorch_model-00002-of-00003.bin")) == {
        "INT004": (("COV001", "INT001"), [("pytorch_model-00002-of-00003.bin", "")])
    }
    index = "pytorch_model.bin.index.json"
    extra = with_json(TORCH, index, lambda c: c["weight_map"].update(x="pytorch_model-00001-of-00003.bin"))
    assert found(extra) == {"COV003": ((), [("pytorch_model-00001-of-00003.bin", "x")])}
    wrong = with_json(TORCH, index, lambda content: content["metadata"].update(total_size=5))
    assert found(wrong) == {"MET002": ((), [(index, "")])}


def test_torch_file_that_would_run_something_is_found():
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return eval, ("1 + 1",)

    target = io.BytesIO()
    torch.save({"a": torch.zeros(2), "b": Evil()}, target)
    (finding,) = report_on({"pytorch_model.bin": target.getvalue()})[1].findings
    assert (finding.id, finding.locations[0].file) == ("SEC001", "pytorch_model.bin")


# Against the configuration


def test_missing_layer_is_one_finding_in_model_order():
    names = [name for name in unpacked(QWEN[SINGLE]) if ".layers.1." in name]
    gone = changed(QWEN, SINGLE, lambda t: [t.pop(name) for name in names])
    assert found(gone) == {"COV003": ((), [(SINGLE, name) for name in sorted(names)])}
    report, _ = report_on(gone)
    assert exit_code(report) is ExitCode.VIOLATED


def test_half_a_norm_differs_from_the_configuration():
    objects = changed(QWEN, SINGLE, lambda t: t.update({NORM: ("F32", [8], bytes(32))}))
    assert found(objects) == {"MET003": ((), [(SINGLE, NORM)])}
    _, run = report_on(objects)
    assert "holds model.norm.weight as [8], config.json implies [16]" in run.findings[0].message


def test_export_of_empty_shells():
    def shell(tensors):
        for name in tensors:
            if "norm" not in name:
                tensors[name] = ("F32", [0], b"")

    objects = changed(QWEN, SINGLE, shell)
    _, run = report_on(objects)
    (finding,) = run.findings
    assert (finding.id, finding.name) == ("COV002", "zero-size-export")
    assert len(finding.locations) == 22
    assert finding.locations[0].tensor == "model.embed_tokens.weight"
    assert "without elements, config.json implies [32, 16], and 21 more like it" in finding.message
    _, run = report_on(without(objects, CONFIG))
    assert not run.findings
    assert "nothing tells whether" in undetermined(run)["COV002"]
    assert run.last_good is None


def test_export_of_nothing():
    assert found({**QWEN, SINGLE: packed({})}) == {"COV002": ((), [(SINGLE, "")])}
    assert found({SINGLE: packed({})}) == {"COV002": ((), [(SINGLE, "")])}


@pytest.mark.parametrize("folder", [path.name for path in FOLDERS if path.parent == FIXTURES])
def test_config_implies_exactly_what_transformers_writes(folder):
    catalog = read(LocalStore(FIXTURES / folder))
    stored = {tensor.name: tensor.shape for tensor in catalog.tensors}
    model = implied(json.loads((FIXTURES / folder / CONFIG).read_text()), stored)
    assert not model.unknown
    assert model.required.items() <= stored.items()
    assert stored.items() <= (model.required | model.optional).items()


@pytest.mark.parametrize("folder", [path.name for path in FOLDERS if path.parent == FIXTURES])
def test_every_required_tensor_is_missed(folder):
    catalog = read(LocalStore(FIXTURES / folder))
    config = json.loads((FIXTURES / folder / CONFIG).read_text())
    names = {tensor.name for tensor in catalog.tensors}
    for name in implied(config, names).required:
        left = implied(config, names - {name})
        assert left.required.keys() - (names - {name}), name


# Adapters of low rank


def lora(shape, rank=4, **more):
    kind = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    size = int(np.prod(shape)) * 4
    config = json.dumps({"peft_type": "LORA", "r": rank, **more}).encode()
    return {"adapter_model.safetensors": packed({kind: ("F32", shape, bytes(size))}), "adapter_config.json": config}


def test_low_rank_adapters_alone_and_beside_a_model():
    assert found(lora([4, 16])) == {}
    assert list(found(lora([0]))) == ["COV002"]
    assert found({**QWEN, **lora([4, 16])}) == {}
    assert list(found({**QWEN, **lora([0])})) == ["COV002"]
    catalog = read(MemoryStore({**QWEN, **lora([4, 16])}))
    assert len(catalog.tensors) == 28
    assert {tensor.role for tensor in catalog.tensors} == {Role.PARAMETER}
    assert not catalog.mesh.axes


# Recognition


def test_step_is_recorded_else_the_folder_number_else_none():
    for path, state, step in (
        ("checkpoint-500", None, 500), ("step_7", None, 7), ("9", None, 9), ("Llama-3", None, 0),
        ("qwen2.5-7", None, 0), ("model", None, 0), ("checkpoint-" + "9" * 40, None, 0),
        ("checkpoint-500", b'{"global_step": 400}', 400), ("checkpoint-500", b'{"global_step": "x"}', 500),
        ("checkpoint-500", b'{"global_step": -1}', 500), ("checkpoint-500", b"{", 500),
    ):  # fmt: skip
        objects = {f"{path}/{SINGLE}": TIED[SINGLE]}
        if state is not None:
            objects[f"{path}/trainer_state.json"] = state
        store = MemoryStore(objects)
        match = ADAPTER.recognise(store, Folder.read(store, path))
        assert isinstance(match, Match)
        assert match.step == step, path


def test_a_step_named_by_itself_has_its_number():
    store = LocalStore(f"{TRAINER}/checkpoint-3/")
    objects = MemoryStore(without(objects_of("trainer/checkpoint-3"), "trainer_state.json"), "runs/checkpoint-3")
    assert ADAPTER.recognise(store, Folder.read(store, "")).step == 3
    assert ADAPTER.recognise(objects, Folder.read(objects, "")).step == 3


def test_folders_of_deepspeed_and_dcp_are_not_claimed():
    foreign = {
        "zero": {"global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"", "latest": b"global_step5"},
        "states": {"mp_rank_00_model_states.pt": b""}, "dcp": {".metadata": b"", "__0_0.distcp": b""},
    }  # fmt: skip
    for name, extra in foreign.items():
        store = MemoryStore({**QWEN, **extra})
        verdict = ADAPTER.recognise(store, Folder.read(store, ""))
        assert isinstance(verdict, Declined), name
        assert 0 < verdict.nearness < 1
    store = LocalStore(HEALTHY / "global_step10")
    adapter, _ = recognise(store, Folder.read(store, ""))
    assert adapter.name == "deepspeed-pipeline"
    store = LocalStore(TRAINER / "checkpoint-3")
    adapter, _ = recognise(store, Folder.read(store, ""))
    assert adapter.name == "hugging-face"
    store = MemoryStore({**QWEN, "global_step5/notes.txt": b""})
    assert isinstance(ADAPTER.recognise(store, Folder.read(store, "")), Match)


def test_reason_tells_what_was_read():
    for objects, words in (
        (LLAMA, "names 3 files"), (QWEN, "holds 27 tensors"), ({SINGLE: b"x"}, "nothing of it could be read"),
        ({INDEX: b"{"}, "nothing of it could be read"),
    ):  # fmt: skip
        store = MemoryStore(objects)
        assert words in ADAPTER.recognise(store, Folder.read(store, "")).reason


def test_there_is_no_pointer():
    store = LocalStore(TRAINER)
    assert ADAPTER.pointer(store, Folder.read(store, "")) is None


# Reading


def test_level_names_opens_no_weights():
    objects = {**LLAMA, SHARDS[0]: b"", "model-00001-of-00009.safetensors": b""}
    catalog = read(MemoryStore(without(objects, SHARDS[1])), names_only=True)
    assert {file.name: file.state for file in catalog.files}[SHARDS[0]] is FileState.PRESENT
    assert {file.name: file.state for file in catalog.files}[SHARDS[1]] is FileState.MISSING
    assert not catalog.tensors
    report, run = report_on(without(objects, SHARDS[1]), Settings(level=Level.NAMES))
    assert [finding.id for finding in run.findings] == ["INT004", "INT009"]
    assert exit_code(report) is ExitCode.VIOLATED


def test_tensors_come_in_model_order():
    names = [
        "lm_head.weight",
        "model.layers.10.w",
        "model.layers.9.w",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ]
    assert sorted(names, key=model_order) == [names[4], names[2], names[1], names[3], names[0]]
    bert = [
        "cls.predictions.bias",
        "bert.pooler.dense.bias",
        "bert.encoder.layer.0.x",
        "bert.embeddings.LayerNorm.bias",
    ]
    assert sorted(bert, key=model_order) == bert[::-1]
    assert model_order("h." + "9" * 10_000 + ".w")[0] == 1
    tensors = read(MemoryStore(QWEN)).tensors
    assert [tensor.order for tensor in tensors] == list(range(27))
    assert (tensors[0].name, tensors[-1].name) == ("model.embed_tokens.weight", "lm_head.weight")


def test_files_that_no_loader_reads_are_listed():
    catalog = read(LocalStore(TRAINER / "checkpoint-3"))
    assert set(catalog.unclaimed) == {"generation_config.json", "training_args.bin"}
    assert [file.container for file in catalog.files] == ["json", "json", "safetensors", *["torch-zip"] * 3]


def test_index_of_endless_files_and_endless_numbers_are_bounded():
    many = {"weight_map": {f"t{n}": f"f{n}.safetensors" for n in range(20_000)}}
    assert list(found({INDEX: json.dumps(many).encode(), SINGLE: TIED[SINGLE]})) == ["INT002"]
    catalog = read(MemoryStore({"model-00001-of-999999.safetensors": TIED[SINGLE]}))
    assert len(catalog.files) == 2


# A download cache: links to files that are named by their digest


def cached(tmp_path, name="qwen2"):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file, content in objects_of(name).items():
        # Small files are kept by the 40 digits of git's digest, which says nothing of SHA-256.
        blob = hashlib.sha256(content).hexdigest() if file.endswith("safetensors") else "0" * 40
        (blobs / blob).write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_links_are_followed_and_their_digests_held_against_the_bytes(tmp_path):
    snapshot = cached(tmp_path)
    _, run = report_on(LocalStore(snapshot), Settings(level=Level.FULL))
    assert not run.findings
    assert run.counts("INT010")[Outcome.HOLDS] == 1
    blob = (snapshot / SINGLE).resolve()
    rotten = bytearray(blob.read_bytes())
    rotten[-1] ^= 1
    blob.write_bytes(rotten)
    _, run = report_on(LocalStore(snapshot), Settings(level=Level.FULL))
    assert [(finding.id, finding.locations[0].file) for finding in run.findings] == [("INT010", SINGLE)]
    assert blob.name in run.findings[0].message
    blob.unlink()
    _, run = report_on(LocalStore(snapshot))
    assert [finding.id for finding in run.findings] == ["INT004"]


def test_files_that_no_cache_names_store_no_digest():
    _, run = report_on(LocalStore(FIXTURES / "qwen2"), Settings(level=Level.FULL))
    assert not run.findings
    assert run.counts("INT010")[Outcome.VIOLATED] == 0


@pytest.mark.filterwarnings("ignore")
def test_sparse_quantised_and_unreadable_tensors_of_torch_files():
    torch = pytest.importorskip("torch")
    objects = objects_of("gpt2_torch")
    content = torch.load(io.BytesIO(objects["pytorch_model.bin"]))
    content |= {
        "sparse": torch.eye(4).to_sparse(), "quantised": torch.quantize_per_tensor(torch.eye(4), 0.1, 3, torch.qint8),
        "meta": torch.empty(3, device="meta"),
    }  # fmt: skip
    buffer = io.BytesIO()
    torch.save(content, buffer)
    catalog = read(MemoryStore({**objects, "pytorch_model.bin": buffer.getvalue()}))
    tensors = {tensor.name: tensor for tensor in catalog.tensors}
    assert tensors["quantised"].dtype.name == "int8"
    assert {"sparse.indices", "sparse.values"} <= tensors.keys()
    assert {name for name, tensor in tensors.items() if "can't be read" in tensor.undetermined} == {"sparse", "meta"}
