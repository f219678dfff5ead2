"""Steps of several torch files: optimizers saved apart, several models, ranks in one folder; by torch, with faults."""

import shutil

import pytest

from auditor.adapters.file_sets import labels
from auditor.audit import audit
from auditor.discovery import discover
from auditor.ledger.folder import open_ledger
from auditor.model.catalog import Role
from auditor.settings import Level, Settings
from auditor.storage.local import LocalStore

torch = pytest.importorskip("torch")
LATER, STEPS = 1.9e9, (10, 20, 30)


@pytest.fixture(scope="session")
def trained():
    """Step to what two small models, of other widths, and their optimizers were then."""
    torch.manual_seed(0)
    widths = (5, 4, 3), (5, 7, 3)
    models = [torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.Tanh(), torch.nn.Linear(b, c)) for a, b, c in widths]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=lr) for m, lr in zip(models, (1e-2, 4e-2), strict=True)]
    saves = {}
    for step in range(1, 31):
        for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            # As in a Wasserstein GAN, the second one is trained three times as often.
            for _ in range(1 + 2 * at):
                optimizer.zero_grad()
                x = torch.randn(16, 5)
                (model(x) - x[:, :3]).square().mean().backward()
                optimizer.step()
        if step in STEPS:
            states = [(m.state_dict(), o.state_dict()) for m, o in zip(models, optimizers, strict=True)]
            saves[step] = [(copied(model), copied(optimizer)) for model, optimizer in states]
    return saves


def copied(value):
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def pair(folder, saves, step):
    (model, optimizer), _ = saves[step]
    torch.save(model, folder / f"ckpt_{step}.pt")
    torch.save(optimizer, folder / f"optim_{step}.pt")


def wrapped_pair(folder, saves, step):
    (model, optimizer), _ = saves[step]
    torch.save({"model": model, "step": step}, folder / f"model_{step:04d}.pt")
    torch.save({"optimizer": optimizer, "step": step}, folder / f"optimizer_{step:04d}.pt")


def gan(folder, saves, step):
    for name, (model, optimizer) in zip("GD", saves[step], strict=True):
        torch.save({"model": model, "optimizer": optimizer, "iteration": step}, folder / f"{name}_{step}.pth")


def gan_of_four(folder, saves, step):
    for name, (model, optimizer) in zip("GD", saves[step], strict=True):
        torch.save(model, folder / f"net{name}_epoch_{step}.pth")
        torch.save(optimizer, folder / f"opt{name}_epoch_{step}.pth")


def averaged(folder, saves, step):
    model, optimizer = saves[step][0]
    torch.save({"model": model, "optimizer": optimizer}, folder / f"model_{step}.pt")
    torch.save({name: weight * 0.5 for name, weight in model.items()}, folder / f"ema_model_{step}.pt")


def ranks(folder, saves, step):
    for rank in range(2):
        model, optimizer = saves[step][0]
        content = {"model": model, "optimizer": optimizer, "step": step}
        torch.save(content, folder / f"step_{step}_rank_{rank}.pt")


def ranks_by_epoch(folder, saves, step):
    for rank in range(2):
        content = {"model": saves[step][0][0], "global_step": step}
        torch.save(content, folder / f"rank{rank}_epoch{step // 10}.pt")


def composer(folder, saves, step):
    """Composer's one file, hand-made after its ``composer/core/state.py``: it needs an older torch."""
    model, optimizer = saves[step][0]
    state = {"model": model, "optimizers": {"AdamW": optimizer}, "timestamp": {"Timestamp": {"batch": step}}}
    torch.save({"state": state, "rng": [{"torch": torch.get_rng_state()}]}, folder / f"ep0-ba{step}-rank0.pt")


LAYOUTS = {
    pair: ("ckpt_30.pt", "torch-file", 2), wrapped_pair: ("model_0030.pt", "torch-file", 2),
    gan: ("D_30.pth", "torch-file", 2), gan_of_four: ("netD_epoch_30.pth", "torch-file", 4),
    averaged: ("model_30.pt", "torch-file", 2), ranks: ("step_30_rank_0.pt", "torch-per-rank", 2),
    ranks_by_epoch: ("rank0_epoch3.pt", "torch-per-rank", 2),
    composer: ("ep0-ba30-rank0.pt", "torch-per-rank", 1),
}  # fmt: skip


@pytest.fixture
def saved(tmp_path, trained):
    def save(layout):
        for step in STEPS:
            layout(tmp_path, trained, step)
        return tmp_path

    return save


def audited(run, **choices):
    return audit(LocalStore(run), Settings(**choices), now=LATER)


def found(report):
    return [
        (run.path, [step.state.step for step in run.steps], [item.id for item in run.findings]) for run in report.runs
    ]


def catalog(run):
    (source,) = discover(LocalStore(run))
    newest = source.steps[-1]
    return newest.adapter.read(LocalStore(run), newest.folder, newest.match, Settings().options)


def roles(run):
    """Names and the files that they are in, by role."""
    read = catalog(run)
    places = {}
    for number, tensor in enumerate(read.tensors):
        (file,) = {read.file_of(int(row)).name for row in read.rows_by_tensor[number]}
        places.setdefault(tensor.role, {})[tensor.name] = file
    return places


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_files_of_one_save_are_one_step(saved, layout):
    path, name, num_files = LAYOUTS[layout]
    run = saved(layout)
    report = audited(run, level=Level.FULL)
    assert found(report) == [("", [10, 20, 30], [])]
    newest = report.runs[0].steps[-1].state
    assert (newest.path, newest.format, report.runs[0].last_good.step) == (path, name, 30)
    assert len(catalog(run).files) == num_files
    assert report.runs[0].coverage.num_bytes_total == sum(file.stat().st_size for file in run.iterdir())


def test_a_folder_a_step_with_the_optimizer_in_a_file_of_its_own(tmp_path, trained):
    for step in STEPS:
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        model, optimizer = trained[step][0]
        torch.save(model, folder / "model.pt")
        torch.save(optimizer, folder / "optim.pt")
        torch.save({"step": step, "rng": torch.get_rng_state()}, folder / "train.pt")
    assert found(audited(tmp_path)) == [("", [10, 20, 30], [])]
    held = roles(tmp_path)
    assert held[Role.FIRST_MOMENT] == dict.fromkeys(held[Role.PARAMETER], "step30/optim.pt")
    optimizer = tmp_path / "step30" / "optim.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-500])
    assert found(audited(tmp_path)) == [("", [10, 20, 30], ["INT002"])]


def test_what_is_saved_apart_is_what_is_saved_together(tmp_path, saved, trained):
    together = tmp_path / "together"
    together.mkdir()
    for step in STEPS:
        model, optimizer = trained[step][0]
        torch.save({"model": model, "optimizer": optimizer}, together / f"model_{step}.pt")
    kept = [[(s.state.parameters, s.state.moments) for s in audited(together).runs[0].steps]]
    shutil.rmtree(together)
    kept.append([(s.state.parameters, s.state.moments) for s in audited(saved(pair)).runs[0].steps])
    assert kept[0] == kept[1]
    assert all(parameters and moments for parameters, moments in kept[0])
    held = roles(tmp_path)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert held[Role.PARAMETER] == dict.fromkeys(names, "ckpt_30.pt")
    assert held[Role.FIRST_MOMENT] == held[Role.SECOND_MOMENT] == dict.fromkeys(names, "optim_30.pt")


def test_each_optimizer_belongs_to_the_model_that_it_fits(saved):
    held = roles(saved(gan_of_four))
    assert held[Role.FIRST_MOMENT] == {name: file.replace("net", "opt") for name, file in held[Role.PARAMETER].items()}
    assert {name.split(".")[0] for name in held[Role.PARAMETER]} == {"netG", "netD"}


def test_averages_have_the_names_of_what_they_are_averages_of(saved):
    held = roles(saved(averaged))
    assert set(held[Role.EMA].values()) == {"ema_model_30.pt"}
    assert held[Role.EMA].keys() == held[Role.PARAMETER].keys()


def test_models_of_one_shape_are_told_apart_by_name_or_not_at_all(tmp_path, trained):
    for step in STEPS:
        model, optimizer = trained[step][0]
        for name in "GD":
            torch.save(model, tmp_path / f"{name}_{step}.pt")
            torch.save(optimizer, tmp_path / f"opt{name}_{step}.pt")
    held = roles(tmp_path)
    assert {name[0]: file for name, file in held[Role.FIRST_MOMENT].items()} == {"G": "optG_30.pt", "D": "optD_30.pt"}
    for step in STEPS:
        for at, name in enumerate("GD"):
            (tmp_path / f"opt{name}_{step}.pt").rename(tmp_path / f"optimizer{'xy'[at]}_{step}.pt")
    (run,) = audited(tmp_path).runs
    assert run.findings == []
    assert any("fits several of the models" in reason for _, reason in run.undetermined())


@pytest.mark.parametrize(("names", "expected"), [
    (("seed1_model_{}.pt", "seed2_model_{}.pt"), 2), (("fold0_step{}.pt", "fold1_step{}.pt"), 2),
    (("gen_{}.pt", "disc_{}.pt"), 1), (("run_1_net_{}.pt", "run_2_net_{}.pt"), 2),
])  # fmt: skip
def test_seeds_and_folds_are_runs(tmp_path, trained, names, expected):
    for step in STEPS:
        for name, (model, _) in zip(names, trained[step], strict=True):
            torch.save(model, tmp_path / name.format(step))
    assert [steps for _, steps, _ in found(audited(tmp_path))] == [list(STEPS)] * expected


def test_series_saved_at_other_steps_are_runs(tmp_path, trained):
    for step in STEPS:
        torch.save(trained[step][0][0], tmp_path / f"big_{step}.pt")
        torch.save(trained[step][1][0], tmp_path / f"small_{step + 1}.pt")
    assert sorted(steps for _, steps, _ in found(audited(tmp_path))) == [[10, 20, 30], [11, 21, 31]]


def test_a_ledger_knows_the_files_again(tmp_path, saved):
    run = saved(gan_of_four)
    for _ in range(2):
        report = audit(LocalStore(run), now=LATER, ledger=open_ledger(str(tmp_path / "ledger")))
        assert found(report) == [("", [10, 20, 30], [])]
    assert all(step.recalled for step in report.runs[0].steps)


# Faults


def cut(name):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:900])


def stale(kind):
    return lambda run: shutil.copy(run / kind.format(20), run / kind.format(30))


def with_nan(name):
    def change(run):
        content = torch.load(run / name)
        next(iter(content["state"].values()))["exp_avg"][0] = float("nan")
        torch.save(content, run / name)

    return change


FAULTS = {
    "an optimizer of the save before": (pair, stale("optim_{}.pt"), ["INT011"]),
    "an optimizer that records the save before": (wrapped_pair, stale("optimizer_{:04d}.pt"), ["INT005"]),
    "one of two models is of the save before": (gan, stale("G_{}.pth"), ["INT005"]),
    "one of two models is cut short": (gan, cut("G_30.pth"), ["INT002"]),
    "an optimizer is cut short": (pair, cut("optim_30.pt"), ["INT002"]),
    "a model is cut short": (pair, cut("ckpt_30.pt"), ["INT002"]),
    "NaN in an optimizer that lies apart": (gan_of_four, with_nan("optG_epoch_30.pth"), ["NUM001"]),
    "a rank's file is cut short": (ranks, cut("step_30_rank_1.pt"), ["INT002"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_file(saved, fault):
    layout, damage, expected = FAULTS[fault]
    run = saved(layout)
    damage(run)
    report = audited(run)
    assert found(report) == [("", [10, 20, 30], expected)]
    assert report.runs[0].last_good.step == 20


@pytest.mark.parametrize(("layout", "name"), [(pair, "optim_30.pt"), (gan, "G_30.pth"), (gan, "D_30.pth")])
def test_a_newest_save_that_lacks_a_file_is_no_alarm_and_not_good(saved, layout, name):
    """It may be written yet, or the other model was trained longer: nothing says that there must be one."""
    run = saved(layout)
    (run / name).unlink()
    report = audited(run)
    assert found(report) == [("", [10, 20, 30], [])]
    assert report.runs[0].last_good.step == 20
    assert ("INT001", f"other saves have more files, here there is no {name}") in report.runs[0].undetermined()


def test_states_that_are_saved_more_rarely_are_no_loss(saved):
    run = saved(pair)
    for step in (10, 20):
        (run / f"optim_{step}.pt").unlink()
    report = audited(run)
    assert found(report) == [("", [10, 20, 30], [])]
    assert report.runs[0].last_good.step == 30


@pytest.mark.parametrize(("names", "expected"), [
    (["netG_epoch_3.pth", "netD_epoch_3.pth"], ["netG", "netD"]), (["a_3.pt"], [""]),
    (["model_3.pt", "model_ema_3.pt"], ["", "ema"]), (["a_b_3.pt", "b_a_3.pt"], ["a_b_#", "b_a_#"]),
])  # fmt: skip
def test_models_are_told_apart_by_the_words_that_differ(names, expected):
    assert labels(names) == expected
