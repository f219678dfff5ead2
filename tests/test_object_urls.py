"""Commands over object stores: the same report as over the same files on disk."""

import json

import pytest

from tests import s3
from tests.command import run
from tests.paths import ROOT

FIXTURES = ROOT / "tests" / "fixtures"


@pytest.fixture(scope="module")
def drift():
    """The sample with BLOOM's fault, in a bucket."""
    url = f"s3://{_bucket()}/training/run"
    s3.upload(ROOT / "samples" / "bloom_drift" / "run", url)
    return url


def _bucket():
    s3.endpoint()
    return s3.new_bucket()


def report_of(path, *options):
    done = run(["check", path, "--format", "json", *options], environment=s3.environment())
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert str(found.pop("run")).startswith(str(path))
    return found, done.returncode


def test_check_finds_the_same_as_on_disk(drift):
    folder, steps = ROOT / "samples" / "bloom_drift" / "run", ("--steps", "40:60")
    (here, code), (there, other) = report_of(folder, *steps), report_of(drift, *steps)
    assert there == here
    assert code == other == 1
    assert [finding["id"] for finding in there["findings"]][:1] == ["REP001"]


@pytest.mark.parametrize(
    "name",
    [
        "dcp/ddp_2",
        "hugging_face/accelerate_bin",
        "megatron_dist/dp2_dp_reshardable",
        "megatron_legacy/tp2",
        "torch_per_rank/healthy",
    ],
)
def test_every_format_is_read_alike(name):
    folder = FIXTURES / name
    url = f"s3://{_bucket()}/{folder.name}"
    s3.upload(folder, url)
    assert report_of(url) == report_of(folder)


def test_last_good_prints_a_url(drift):
    done = run(["last-good", drift, "--steps", "90:110"], environment=s3.environment())
    assert done.stdout.decode().strip() == f"{drift}/global_step100", done.stderr
    assert done.returncode == 0


def test_inspect_and_a_single_file(drift):
    assert run(["inspect", drift], environment=s3.environment()).returncode == 0
    folder = FIXTURES / "hugging_face"
    file = next(folder.rglob("*.safetensors"))
    url = f"s3://{_bucket()}/{file.name}"
    s3.put(url, file.read_bytes())
    assert report_of(url) == report_of(file)


def test_wrong_bucket_and_wrong_prefix(drift):
    done = run(["check", "s3://no-such-bucket/run"], environment=s3.environment())
    assert (done.returncode, b"NoSuchBucket" in done.stderr) == (3, True)
    done = run(["check", drift + "-not"], environment=s3.environment())
    assert (done.returncode, b"no such object" in done.stderr) == (2, True)


def test_export_reads_a_url_and_does_not_write_to_one(drift, tmp_path):
    done = run(["export", drift, tmp_path / "out.zarr", "--steps", "10"], environment=s3.environment())
    assert done.returncode == 0, done.stderr
    done = run(["export", drift, "s3://bucket/out.zarr"], environment=s3.environment())
    assert (done.returncode, b"local disk" in done.stderr) == (2, True)


def test_from_python(drift, monkeypatch):
    import auditor

    s3.use(monkeypatch)
    assert auditor.check(drift, steps="10").runs[0].steps
    assert "10" in auditor.open_zarr(drift)["steps"]
