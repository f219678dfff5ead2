"""INT011: optimizer state of an earlier save, and healthy runs whose counters repeat all the same; INT005 beside."""

import pytest

from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.audit import audit
from auditor.invariants.integrity import steps_agree
from auditor.invariants.integrity_runs import optimizer_states_advance
from auditor.invariants.optimizer import ranks_count_alike
from auditor.model.catalog import File, Role, Scalar
from auditor.model.dtype import FLOAT32
from auditor.model.finding import Severity
from auditor.model.mesh import EVERYWHERE, NO_MESH, Coordinate, Mesh
from auditor.model.observation import Content, Observations, contents, same_content, unobserved
from auditor.model.region import Box
from auditor.model.run import RunState, StepEvidence, StepState, files_of_another_step
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore
from tests.rewriting import audited, change, only, ranks, store

torch = pytest.importorskip("torch")
nn = torch.nn
LAST = 6


class Residual(nn.Module):
    """Two embeddings' worth of parameters that are always used, and blocks that may be left out."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x, used):
        x = self.stem(x)
        for number in used:
            x = x + self.blocks[number](x).tanh()
        return self.head(x)


class Run:
    """A training that saves after every step, as two data-parallel ranks would."""

    def __init__(self, folder):
        torch.manual_seed(0)
        self.folder, self.model = folder, Residual()
        self.begin_anew()

    def begin_anew(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def loss(self, used=range(4)):
        self.optimizer.zero_grad()
        return self.model(torch.randn(5, 6), used).square().mean()

    def update(self, used=range(4)):
        self.loss(used).backward()
        self.optimizer.step()

    def save(self, step, **more):
        content = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        store(self.folder, step, content | more)


def with_a_skipped_step(folder):
    run = Run(folder)
    for step in range(1, LAST + 1):
        if step != 4:
            run.update()
        run.save(step)


def with_a_scaler(folder):
    run, scaler = Run(folder), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(1, LAST + 1):
        scaler.scale(run.loss() * (float("inf") if step == 4 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.save(step, scaler=scaler.state_dict())


def with_accumulated_gradients(folder):
    run = Run(folder)
    for step in range(1, LAST + 1):
        if step % 3 == 1:
            run.update()
        run.save(step)


def with_dropped_layers(folder):
    """In step 4 and 5 most parameters stay as they are."""
    run = Run(folder)
    for step, used in enumerate((range(4), (0, 1, 2), (1, 2, 3), (), (), (0,)), start=1):
        run.update(used)
        run.save(step)


def with_an_optimizer_a_phase(folder):
    run = Run(folder)
    for step in range(1, LAST + 1):
        run.begin_anew()
        run.update()
        run.update()
        run.save(step)


def plain_run(folder):
    run = Run(folder)
    for step in range(1, LAST + 1):
        run.update()
        run.save(step)


HEALTHY = [
    with_a_skipped_step, with_a_scaler, with_accumulated_gradients, with_dropped_layers, with_an_optimizer_a_phase,
    plain_run,
]  # fmt: skip


def put_back(folder, step, old):
    """Let the files of ``step`` hold the optimizer of ``old``."""
    kept = torch.load(folder / f"step_{old}/rank_0.pt")["optimizer"]
    change(ranks(folder, step=step), lambda content: content.update(optimizer=kept))


def found(folder, level=Level.VALUES):
    return [finding for finding in audited(folder, level).findings if finding.id in ("INT005", "INT011", "OPT003")]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_counters_of_healthy_runs_may_repeat(tmp_path, make):
    make(tmp_path)
    assert found(tmp_path) == []


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("step", "old"), [(3, 2), (LAST, 2), (LAST, LAST - 1)])
def test_the_optimizer_of_an_earlier_save(tmp_path, make, step, old):
    make(tmp_path)
    if make is with_accumulated_gradients and (step, old) != (LAST, 2):
        pytest.skip("no update was made between these two saves")
    put_back(tmp_path, step, old)
    (finding,) = found(tmp_path)
    assert (finding.id, finding.severity) == ("INT011", Severity.ERROR)
    assert {location.file for location in finding.locations} == {f"step_{step}/rank_{rank}.pt" for rank in (0, 1)}
    # Whether a weight that stood still after it moved since, nothing tells of layers that are dropped now and then.
    newest = old if make is with_dropped_layers else LAST
    assert audited(tmp_path, Level.VALUES).last_good.step == (newest if step < LAST else LAST - 1)


def test_counters_alone_are_a_suspicion(tmp_path):
    with_a_skipped_step(tmp_path)
    finding = only(tmp_path)
    assert (finding.id, finding.severity) == ("INT011", Severity.WARNING)
    assert "--level values" in finding.message
    assert audited(tmp_path).last_good.step == LAST


@pytest.mark.parametrize("make", [with_a_scaler, with_dropped_layers, plain_run], ids=lambda make: make.__name__)
def test_no_suspicion_where_the_files_say_why_or_not_all_counters_repeat(tmp_path, make):
    make(tmp_path)
    assert found(tmp_path, Level.HEADERS) == []


def test_a_newest_step_that_alone_is_read_whole(tmp_path, monkeypatch):
    """Steps of large runs are read at two levels; what is stored more than once was read of both."""
    monkeypatch.setattr("auditor.listing.LARGE_RUN_BYTES", 0)
    for put, expected in ((False, []), (True, [("INT011", Severity.ERROR)])):
        with_a_skipped_step(tmp_path)
        if put:
            put_back(tmp_path, LAST, LAST - 1)
        (run,) = audit(LocalStore(tmp_path), Settings()).runs
        assert [(finding.id, finding.severity) for finding in run.findings] == expected


@pytest.mark.parametrize("named", [True, False])
def test_an_average_of_weights_goes_on_without_the_optimizer(tmp_path, named):
    """Names say which parameters are the optimizer's own, or else their shapes do: it is none of them."""
    run, average = Run(tmp_path), torch.zeros(8, 6)
    if named:
        run.optimizer = torch.optim.AdamW(run.model.named_parameters(), lr=1e-3)
    for step in range(1, LAST + 1):
        if step != 4:
            run.update()
        average = average.lerp(run.model.stem.weight.detach(), 0.1)
        run.save(step, model=run.model.state_dict() | {"average": average})
    assert found(tmp_path) == []


# Made by hand

MOMENTS = {letter: (Content("moments", letter),) for letter in "abc"}
PARAMETERS = {letter: (Content("parameters", letter),) for letter in "abc"}


def state(step, count, moments="", updated="", **more):
    return StepState(
        step, f"s{step}", "f", whole=True, optimizer_step=float(count), moments=MOMENTS.get(moments, ()),
        updated=PARAMETERS.get(updated, ()), **more,
    )  # fmt: skip


def repeated(*states):
    judged = optimizer_states_advance(RunState(states))
    return {step: violation.severity for step, judgement in judged.items() for violation in judgement.violations}


@pytest.mark.parametrize(
    ("moments", "parameters", "expected"),
    [
        ("aa", "ab", {200: None}), ("aa", "aa", {}), ("ab", "ab", {}), ("ab", "aa", {}), ("a ", "ab", {200: 2}),
        ("  ", "ab", {200: 2}), ("aa", "a ", {200: 2}), ("  ", "aa", {}),
    ],
)  # fmt: skip
def test_content_decides_where_it_was_read(moments, parameters, expected):
    pairs = zip((100, 200), moments, parameters, strict=True)
    assert repeated(*(state(step, 7, one, two) for step, one, two in pairs)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, {200: 2}),
        ({"parameters": PARAMETERS["a"]}, {"parameters": PARAMETERS["a"]}, {}),
        ({"parameters": PARAMETERS["a"]}, {"parameters": PARAMETERS["b"]}, {200: 2}),
        ({"num_skipped": 3.0}, {"num_skipped": 103.0}, {}),
        ({"num_skipped": 3.0}, {"num_skipped": 5.0}, {200: 2}),
        ({"loss_scale": 1024.0}, {"loss_scale": 512.0}, {}),
        ({"loss_scale": 1024.0}, {"loss_scale": 1024.0}, {200: 2}),
        ({"counters": "x"}, {"counters": "y"}, {}),
        ({"moved": False}, {}, {}),
    ],
)
def test_what_explains_counters_that_repeat(before, after, expected):
    assert repeated(state(100, 7, **before), state(200, 7, **after)) == expected


def test_the_save_whose_state_it_is_need_not_be_the_first_with_that_count():
    states = state(100, 3, "a", "a"), state(200, 3, "b", "b"), state(300, 3, "b", "c")
    assert repeated(*states) == {300: None}
    judged = optimizer_states_advance(RunState(states))
    assert "as in step 200" in judged[300].violations[0].message


def counts(*numbers, save_every=100):
    """Steps in which counters of a run's saves, of which nothing was read, rouse suspicion."""
    return list(repeated(*(state(at * save_every, number) for at, number in enumerate(numbers, start=1))))


def test_an_optimizer_may_begin_anew():
    assert counts(100, 200, 100, 200, 300) == []
    assert counts(100, 200, 300, 30, 130) == []
    assert counts(100, 200, 100) == [300]
    assert counts(100, 200, 200) == [300]
    assert counts(100, 200, 100, 400) == [300]
    assert counts(100, 200, 200, 300) == [300]


def counted(**files):
    """A step of two data-parallel ranks, by the counters in each one's file."""
    mesh = Mesh((("dp", 2),))
    builder = CatalogBuilder()
    for rank, (name, numbers) in enumerate(files.items()):
        at = Coordinate.of(dp=rank)
        builder.file(File(f"{name}.pt", coordinate=at))
        builder.scalars += [
            Scalar("optimizer_step", float(number), f"{name}.pt", at, tensor) for tensor, number in numbers.items()
        ]
    catalog = builder.build(5, "", "made-up", mesh, {}, ())
    return StepEvidence(catalog, unobserved(catalog))


@pytest.mark.parametrize(
    ("files", "stale"),
    [
        # Experts of two ranks: the most frequent counts differ.
        ({"a": {"w": 5, "x": 5, "y": 3}, "b": {"w": 5, "z": 3, "q": 3}}, []),
        # One that another rank's single parameters don't make stale.
        ({"a": {"w": 5, "x": 4}, "b": {"z": 3, "q": 3}}, []),
        ({"a": {"w": 5, "x": 5}, "b": {"w": 5, "x": 5}}, []),
        ({"a": {"w": 5, "x": 5}, "b": {"w": 3, "x": 3}}, ["b.pt"]),
        ({"a": {"": 5}, "b": {"": 3}}, ["b.pt"]),
    ],
)
def test_files_whose_parameters_count_apart_are_of_no_other_step(files, stale):
    evidence = counted(**files)
    assert sorted(files_of_another_step(evidence.catalog)) == stale
    judged = steps_agree(evidence)
    assert [violation.subject for violation in judged.violations] == stale
    assert judged.num_holds + len(stale) + sum(judged.not_applicable.values()) == 2


def test_a_stale_file_among_parameters_that_count_apart_shows_in_them():
    judged = ranks_count_alike(counted(a={"w": 5, "x": 4}, b={"w": 3, "x": 3}))
    assert {violation.subject for violation in judged.violations} == {"w", "x"}


def test_contents_are_of_what_was_read_whole():
    builder = CatalogBuilder()
    tensors = [builder.tensor(name, Role.PARAMETER, FLOAT32, (2,), 0) for name in "ab"]
    file = builder.file(File("f"))
    for tensor in tensors:
        builder.piece(tensor, file, 0, Box((0,), (2,)), EVERYWHERE)
    catalog = builder.build(1, "", "made-up", NO_MESH, {}, ())
    seen = unobserved(catalog)
    assert contents(catalog, seen, tensors) == ()
    seen.pieces["read"] = 1, 0
    (one,) = contents(catalog, seen, tensors)
    seen.pieces["read"], seen.pieces["lane0"] = 1, (0, 7)
    (both,) = contents(catalog, seen, tensors)
    seen = Observations(seen.pieces.copy())
    seen.pieces["lane1"] = 0, 9
    (changed,) = contents(catalog, seen, tensors)
    assert same_content([one], [both]) is None
    assert same_content([both], [changed]) is False
    assert same_content([one, both], [both, one]) is True
