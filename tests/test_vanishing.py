"""A step that is deleted or moved while a run is audited: never a finding about it, and the others are judged."""

import time
from contextlib import contextmanager

import pytest

from auditor.audit import audit
from auditor.settings import DEFAULTS
from auditor.storage.memory import MemoryStore
from auditor.storage.store import Entry, ObjectMissingError, WrappedHandle
from auditor.verdict import ExitCode, exit_code, step_verdict
from tests.paths import DCP, ROOT, TP2_PP2


class Departing(MemoryStore):
    """Takes the files of one folder away, all or one at a time, from its ``at``-th call on."""

    def __init__(self, objects, folder: str, at: float, *, singly: bool = False) -> None:
        super().__init__(objects)
        self.folder, self.at, self.singly, self.calls = folder, at, singly, 0

    def count(self) -> None:
        self.calls += 1
        going = sorted(name for name in self.objects if name.startswith(f"{self.folder}/"))
        if self.calls >= self.at and going:
            # A new dictionary: whoever goes through the old one goes on with that.
            gone = going[:1] if self.singly else going
            self.objects = {name: content for name, content in self.objects.items() if name not in gone}

    def list(self, folder):
        self.count()
        return MemoryStore(self.objects).list(folder)

    def stat(self, name):
        self.count()
        return super().stat(name)

    @contextmanager
    def open(self, name):
        self.count()
        with super().open(name) as handle:
            yield WrappedHandle(handle, self.read)

    def read(self, handle, offset, buffer) -> None:
        self.count()
        handle.read_into(offset, buffer)


def content_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def judged(store):
    report = audit(store, DEFAULTS, now=time.time())
    (run,) = report.runs
    return exit_code(report), run, {step.state.path: step_verdict(step, run, report.settings) for step in run.steps}


RUNS = {
    "torch-dcp": (DCP / "fsdp2_2", "step-2", "step-4"),
    "deepspeed-pipeline": (TP2_PP2, "global_step3", "global_step6"),
    "hugging-face": (ROOT / "tests" / "fixtures" / "hugging_face" / "trainer", "checkpoint-3", "checkpoint-6"),
}
PHASES = 0, 0.04, 0.1, 0.25, 0.5, 0.85
"""Parts of an audit's calls, after which a step goes: while folders are listed, headers or weights read."""


@pytest.mark.parametrize("newest", [False, True], ids=["oldest", "newest"])
@pytest.mark.parametrize("name", RUNS)
def test_a_step_that_goes_is_no_finding_whenever_it_does(name, newest):
    path, *steps = RUNS[name]
    victim, other = steps if not newest else reversed(steps)
    objects = content_of(path)
    sound = Departing(objects, victim, float("inf"))
    assert judged(sound)[0] == ExitCode.HOLDS
    codes = []
    for number, phase in enumerate(PHASES):
        singly = bool(number % 2)
        code, run, verdicts = judged(Departing(objects, victim, 2 + int(phase * sound.calls), singly=singly))
        assert run.findings == [], phase
        assert verdicts[other] == "holds", phase
        assert code in (ExitCode.CHANGED, ExitCode.HOLDS), phase
        if code is ExitCode.CHANGED:
            assert run.last_good.path == other, phase
            assert victim in run.vanished or any(step.changed for step in run.steps), phase
        codes.append(code)
    # Only once all of it was read may it go without a word.
    assert codes[:3] == [ExitCode.CHANGED] * 3
    assert codes == sorted(codes, reverse=True)


def test_a_file_that_never_was_there_is_a_finding_though_another_step_goes():
    path, victim, other = RUNS["torch-dcp"]
    objects = content_of(path)
    del objects[f"{other}/__1_0.distcp"]
    code, run, verdicts = judged(Departing(objects, victim, 40))
    assert code == ExitCode.CHANGED
    assert verdicts[other] == "violated"
    assert "INT001" in [finding.id for finding in run.findings]


def test_a_pointer_to_a_step_that_went_or_came_meanwhile_is_not_judged():
    objects = content_of(TP2_PP2)
    assert objects["latest"] == b"global_step6"
    _, run, _ = judged(Departing(objects, "global_step6", 2))
    assert (run.vanished, run.findings) == (["global_step6"], [])

    class Saving(MemoryStore):
        def open(self, name):
            if name == "latest":
                self.objects |= {"global_step9/latest_files": b"", "latest": b"global_step9"}
            return super().open(name)

    code, run, _ = judged(Saving(objects))
    assert (code, run.findings) == (ExitCode.HOLDS, [])
    _, run, _ = judged(MemoryStore({**objects, "latest": b"global_step9"}))
    assert [finding.id for finding in run.findings] == ["INT003"]


def test_a_log_that_grows_beside_damage_hides_nothing():
    path, _, _ = RUNS["torch-dcp"]
    objects = content_of(path) | {"step-4/train.log": b"0"}
    objects["step-4/__1_0.distcp"] = objects["step-4/__1_0.distcp"][:-100]

    class Logging(MemoryStore):
        def open(self, name):
            self.objects["step-4/train.log"] += b"."
            return super().open(name)

    code, run, _ = judged(Logging(objects))
    assert code == ExitCode.VIOLATED
    assert [finding.id for finding in run.findings] == ["INT002"]


def test_a_folder_that_was_emptied_and_went_is_no_step_that_lost_its_files():
    class Emptied(MemoryStore):
        there = 3

        def list(self, folder):
            if folder == "step-6":
                self.there -= 1
                if self.there < 0:
                    raise ObjectMissingError(folder)
                return iter(())
            return iter([*super().list(folder), *([Entry("step-6", True)] if not folder else [])])

    code, run, verdicts = judged(Emptied(content_of(RUNS["torch-dcp"][0])))
    assert (code, run.findings) == (ExitCode.CHANGED, [])
    assert verdicts == {"step-2": "holds", "step-4": "holds", "step-6": "incomplete"}
