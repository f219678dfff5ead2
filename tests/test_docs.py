"""Documents say what the code says. AUDITOR_REWRITE_DOCS=1 writes the generated ones anew."""

import os
import re

import pytest

from auditor.invariants.invariant import FAMILIES
from auditor.invariants.registry import find, invariants, select
from auditor.report.catalogue import pages
from tests.paths import ROOT


def test_invariant_pages_are_fresh():
    path = ROOT / "docs" / "invariants.md"
    if os.environ.get("AUDITOR_REWRITE_DOCS"):
        path.write_text(pages())
    assert path.read_text() == pages()


def test_every_invariant_is_documented_and_has_a_judge():
    assert len({item.id for item in invariants()}) == len(invariants()) >= 15
    for item in invariants():
        assert item.family in FAMILIES
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", item.name), item.name
        judges = (item.judge_step, item.judge_run, item.judge_motion, item.judge_waivers)
        # A step may be judged by itself and by the save before it.
        assert sum(judge is not None for judge in judges) - bool(item.judge_step and item.judge_motion) == 1, item.id
        for text in (item.statement, item.rationale, item.source, item.example, item.misses, item.hint):
            assert len(text) > 20, item.id


def test_selection_by_id_and_family():
    assert find("rep001").name == "replicas-differ"
    assert find("Replicas-Differ") is find("REP001")
    assert len({item.name for item in invariants()} | {item.id for item in invariants()}) == 2 * len(invariants())
    assert {item.family for item in select(["REP", "num001"], [])} == {"REP", "NUM"}
    assert all(item.family != "INT" for item in select([], ["INT"]))
    with pytest.raises(LookupError):
        select(["NOPE"], [])


def test_public_cases_name_tests_and_invariants_that_are_there():
    text = (ROOT / "docs" / "public-cases.md").read_text()
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.M)}
    named = re.findall(r"`(test_\w+?)(?:\[(.+?)\])?`", text)
    assert len(named) > 60
    for name, case in named:
        assert name in defined, name
        assert not case or any(f'"{case}":' in source for source in sources), case
    assert all(find(identifier) for identifier in re.findall(r"\b[A-Z]{3}\d{3}\b", text))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/zarr-layout.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    for link in links:
        if not link.startswith("http"):
            assert ((ROOT / name).parent / link).exists(), link


def test_python_in_the_readme_runs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out == "50\n(16, 16)\n"


def test_output_in_the_readme_is_what_the_command_prints(monkeypatch):
    from auditor.audit import audit
    from auditor.report.text_report import text_lines
    from auditor.storage.local import LocalStore

    monkeypatch.chdir(ROOT)
    block = (ROOT / "README.md").read_text().split("```\nsamples/bloom_drift/run\n")[1].split("```")[0]
    printed = [re.sub(r"\[/?[^\]]*\]", "", line) for line in text_lines(audit(LocalStore("samples/bloom_drift/run")))]
    for line in block.splitlines():
        start = line.split("…")[0].rstrip() if line.strip().endswith("…") or "· …" in line else line
        assert not start.strip() or any(other.startswith(start) for other in printed), line
