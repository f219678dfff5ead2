"""TIE: tied parameters are equal, and the one that loaders read is there."""

from dataclasses import replace

import numpy as np
import pytest

from auditor.invariants.registry import find
from auditor.model.catalog import Problem, ProblemKind
from auditor.model.dtype import BFLOAT16, FLOAT32
from auditor.model.finding import Outcome
from auditor.model.observation import Read
from auditor.timeline.findings import findings
from tests.invariants.measured import FIRST, MASTER, PARAMETER, Step

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def table(seed=0, rows=32):
    return np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)


def tied(head=None, *, names=(EMBEDDING, HEAD), **more):
    step = Step(group=None)
    step.tie(*names)
    step.add(EMBEDDING, PARAMETER, table(), dtype=BFLOAT16)
    if head is not None:
        step.add(HEAD, PARAMETER, head, **{"dtype": BFLOAT16, **more})
    return step


def only(judgement):
    (violation,) = judgement.violations
    return violation


# TIE001


def test_tied_parameters_that_are_equal():
    assert tied(table()).judge("TIE001").outcome is Outcome.HOLDS


def test_tied_parameters_that_differ():
    found = only(tied(table(1)).judge("TIE001"))
    assert found.subject == HEAD
    assert found.message == (
        f"{HEAD} (parameter) is not equal to {EMBEDDING}, to which it is tied (config.json: tie_word_embeddings)"
    )


def test_parameters_that_nothing_ties_may_differ():
    step = Step(group=None)
    for seed, name in enumerate((EMBEDDING, HEAD)):
        step.add(name, PARAMETER, table(seed))
    judged = step.judge("TIE001")
    assert judged.outcome is Outcome.NOT_APPLICABLE
    assert judged.not_applicable == {"nothing says that parameters are tied": 1}


def test_a_tie_of_which_one_is_stored_has_nothing_to_compare():
    judged = tied().judge("TIE001")
    assert judged.not_applicable == {"tied parameters are stored once": 1}


def test_every_member_is_compared_with_the_first():
    step = tied(table(), names=(EMBEDDING, HEAD, "decoder.embed_tokens.weight"))
    step.add("decoder.embed_tokens.weight", PARAMETER, table(2), dtype=BFLOAT16)
    judged = step.judge("TIE001")
    assert (judged.num_holds, only(judged).subject) == (1, "decoder.embed_tokens.weight")


@pytest.mark.parametrize("role", [MASTER, FIRST])
def test_masters_and_moments_of_tied_parameters(role):
    step = tied(table())
    for seed, name in enumerate((EMBEDDING, HEAD)):
        step.add(name, role, table(seed + 5))
    judged = step.judge("TIE001")
    assert (judged.num_holds, only(judged).locations[0].role) == (1, role)


def test_optimizer_state_under_the_first_name_alone_is_healthy():
    step = tied(table())
    step.moments(EMBEDDING, table(), np.square(table()))
    assert step.judge("TIE001").outcome is Outcome.HOLDS


def test_a_padded_vocabulary_is_not_known():
    padded = np.concatenate([table(), np.zeros((8, 8), np.float32)])
    assert "padded" in next(iter(tied(padded).judge("TIE001").undetermined))


@pytest.mark.parametrize(("seed", "outcome"), [(0, Outcome.HOLDS), (1, Outcome.VIOLATED)])
def test_two_precisions_are_compared_by_rounding(seed, outcome):
    step = tied(table(seed), dtype=FLOAT32)
    assert len(find("TIE001").pairings(step.evidence().catalog)) == 1
    judged = step.judge("TIE001")
    assert judged.outcome is outcome
    if judged.violations:
        assert only(judged).message.startswith(f"{HEAD} (parameter) is not equal to {EMBEDDING}")
        assert "beyond rounding" in only(judged).locations[0].detail


def test_what_was_not_read_is_not_known():
    assert tied(table(1), read=Read.LOST).judge("TIE001").outcome is Outcome.UNDETERMINED
    assert tied(table(1)).judge("TIE001", unread="names only").undetermined == {"names only": (HEAD,)}


@pytest.mark.parametrize("drifted", [EMBEDDING, HEAD])
def test_drift_of_a_replica_is_told_once(drifted):
    step = Step(group=None)
    step.tie(EMBEDDING, HEAD)
    for name in (EMBEDDING, HEAD):
        step.add(name, PARAMETER, table(), table(name == drifted))
    chosen = [find("REP001"), find("TIE001")]
    (found,) = findings({1: {item.id: step.judge(item.id) for item in chosen}}, chosen)
    # A head of which one replica is none of the embedding's is untied, too; an embedding that drifted is not.
    assert (found.id, found.consequences) == ("REP001", ("TIE001",) if drifted == HEAD else ())


def test_only_tied_tensors_are_asked_for():
    step = tied(table())
    step.add("model.norm.weight", PARAMETER, table())
    assert list(find("TIE001").reads(step.evidence().catalog)) == [0, 1]
    assert list(find("TIE001").reads(tied().evidence().catalog)) == []


def test_a_tie_of_which_a_member_was_not_chosen_is_not_judged():
    catalog = tied(table(1)).evidence().catalog
    assert catalog.only(lambda name: name == HEAD).ties == ()
    assert catalog.only(lambda name: True).ties == catalog.ties


# TIE002


def test_the_first_of_tied_parameters_is_enough():
    assert tied().judge("TIE002").outcome is Outcome.HOLDS
    assert tied(table()).judge("TIE002").outcome is Outcome.HOLDS


def head_alone(**more):
    step = Step(group=None)
    step.tie(EMBEDDING, HEAD)
    step.add(HEAD, PARAMETER, table(), **more)
    return step


def test_the_other_of_tied_parameters_alone_is_not():
    found = only(head_alone().judge("TIE002"))
    assert (found.subject, found.locations[0].tensor) == (EMBEDDING, EMBEDDING)


def test_masters_stand_for_weights_that_are_not_stored():
    step = Step(group=None)
    step.tie(EMBEDDING, HEAD)
    step.add(EMBEDDING, MASTER, table())
    assert step.judge("TIE002").outcome is Outcome.HOLDS


def test_a_tie_of_another_model_part_is_not_judged():
    step = Step(group=None)
    step.tie(EMBEDDING, HEAD)
    step.add("adapter.weight", PARAMETER, table())
    assert step.judge("TIE002").not_applicable == {"none of the tied parameters is stored": 1}


def test_what_may_be_in_a_lost_file_is_not_known():
    step = head_alone()
    step.lose_a_file()
    assert step.judge("TIE002").undetermined == {"it may be in a file that could not be read": (EMBEDDING,)}


def test_an_absent_embedding_that_the_configuration_implies_is_told_once():
    step = head_alone()
    problem = Problem(ProblemKind.ABSENT, "model.pt", f"lacks {EMBEDDING}, which config.json implies", tensor=EMBEDDING)
    step.builder.problems.append(problem)
    chosen = [find("COV003"), find("TIE002")]
    evidence = step.evidence()
    judged = {"TIE002": find("TIE002").judge_step(evidence)}
    implied = replace(evidence, catalog=replace(evidence.catalog, not_implied=""))
    judged["COV003"] = find("COV003").judge_step(implied)
    (found,) = findings({1: judged}, chosen)
    assert (found.id, found.consequences) == ("COV003", ("TIE002",))
