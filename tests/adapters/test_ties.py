"""Which parameters files and configurations say are one tensor."""

import shutil

import pytest

from auditor.adapters.ties import distinct
from auditor.model.optimizer import Tie
from tests.faults import catalog_of
from tests.paths import ROOT, TP2_PP2
from tests.rewriting import MEGATRON, change, store

torch = pytest.importorskip("torch")

HUGGING_FACE = ROOT / "tests" / "fixtures" / "hugging_face"


def test_configuration_ties_embedding_and_head(tmp_path):
    for name, pair in {
        "gpt2_tied": ("transformer.wte.weight", "lm_head.weight"),
        "mistral_tied": ("model.embed_tokens.weight", "lm_head.weight"),
        "bert_masked": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    }.items():
        (tie,) = catalog_of(HUGGING_FACE / name, 0).ties
        assert tie.names == pair
        assert tie.source.startswith("config.json: tie_word_embeddings")
    for name in ("llama_sharded", "gpt_neox", "bert", "gpt2_torch"):
        assert catalog_of(HUGGING_FACE / name, 0).ties == ()


def test_two_keys_of_one_storage_are_tied(tmp_path):
    weight = torch.randn(5, 3)
    tree = {"model": {"embed.weight": weight, "norm.weight": torch.ones(3), "head.weight": weight}}
    store(tmp_path, 1, tree)
    (tie,) = catalog_of(tmp_path, 1).ties
    assert (tie.names, tie.source) == (("embed.weight", "head.weight"), "one storage in rank_0.pt")


def test_views_of_one_buffer_are_not_tied(tmp_path):
    flat = torch.randn(12)
    store(tmp_path, 1, {"model": {"a": flat[:6], "b": flat[6:], "c": flat[:6].view(2, 3), "d": torch.zeros(0)}})
    assert catalog_of(tmp_path, 1).ties == ()


def test_storage_of_a_hugging_face_file_ties(tmp_path):
    shutil.copytree(HUGGING_FACE / "gpt2_torch", tmp_path / "model")
    path = tmp_path / "model" / "pytorch_model.bin"
    content = torch.load(path)
    content["lm_head.weight"] = content["transformer.wte.weight"]
    torch.save(content, path)
    (tie,) = catalog_of(tmp_path / "model", 0).ties
    assert (tie.names, tie.source) == (("transformer.wte.weight", "lm_head.weight"), "one storage in pytorch_model.bin")


def test_arguments_tie_embedding_and_head_of_one_file(tmp_path):
    shutil.copytree(MEGATRON / "tp2", tmp_path / "run")

    def by(content):
        content["model"]["output_layer.weight"] = content["model"]["embedding.word_embeddings.weight"].clone()

    change(tmp_path.glob("run/iter_0000004/*/*.pt"), by)
    (tie,) = catalog_of(tmp_path / "run", 4).ties
    assert tie.names == ("embedding.word_embeddings.weight", "output_layer.weight")
    assert tie.source.startswith("args")


@pytest.mark.parametrize("folder", [MEGATRON / "tp2_pp2", MEGATRON / "tp2", TP2_PP2], ids=lambda folder: folder.name)
def test_replicas_over_stages_are_one_name_and_no_tie(folder):
    assert catalog_of(folder, 6 if folder == TP2_PP2 else 4).ties == ()


def test_a_set_of_names_is_tied_once():
    ties = [Tie(("a", "b"), "one"), Tie(("b", "a"), "two"), Tie(("a", "a"), "three"), Tie(("a", "c"), "four")]
    assert distinct(ties) == [ties[0], ties[3]]
