"""What object stores add to the contract of all stores (test_stores.py): versions, buckets, rights, ranges."""

import pickle
import traceback

import pytest

from auditor.errors import UsageError
from auditor.storage.retrying import RetryingStore
from auditor.storage.roots import above, open_store, store_at
from auditor.storage.store import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
    read_bytes,
)
from tests import s3

LARGE = bytes(range(256)) * 1024


@pytest.fixture
def bucket(monkeypatch):
    s3.use(monkeypatch)
    name = s3.new_bucket()
    s3.put(f"s3://{name}/run/large.bin", LARGE)
    s3.put(f"s3://{name}/run/small.bin", b"small")
    return name


def test_location_is_the_url(bucket):
    assert store_at(f"s3://{bucket}/run/").location == f"s3://{bucket}/run"
    assert store_at(f"s3://{bucket}").location == f"s3://{bucket}"


def test_wrong_bucket_is_never_a_missing_object(bucket):
    store = store_at(f"s3://{bucket}-no/run")
    for act in (lambda: store.stat("x"), lambda: list(store.list("")), lambda: store.open("x").__enter__()):
        with pytest.raises(StorageError, match="404 NoSuchBucket") as caught:
            act()
        assert not isinstance(caught.value, ObjectMissingError)
    with pytest.raises(StorageError, match="NoSuchBucket"):
        open_store([f"s3://{bucket}-no/run"])


def test_missing_prefix_of_a_bucket_that_is_there_is_wrong_usage(bucket):
    with pytest.raises(UsageError, match="no such object"):
        open_store([f"s3://{bucket}/ran"])


def test_an_object_named_by_its_url_is_a_single_file(bucket):
    store = open_store([f"s3://{bucket}/run/small.bin"])
    assert not store.stat("").is_folder
    assert [entry.name for entry in store.list("")] == ["small.bin"]


def test_what_lies_beside_the_root_is_found():
    """Of the root's own witness."""
    found = above(RetryingStore(store_at("s3://bucket/run/step-3/")))
    assert (found[0].location, found[1]) == ("s3://bucket/run", "step-3")
    assert above(store_at("s3://bucket")) is None


@pytest.mark.parametrize("listed", [True, False])
def test_object_replaced_after_it_was_opened(bucket, listed):
    store = store_at(f"s3://{bucket}/run")
    if listed:
        list(store.list(""))
    with store.open("large.bin") as handle:
        assert read_bytes(handle, 0, 3) == LARGE[:3]
        s3.put(f"s3://{bucket}/run/large.bin", LARGE[::-1])
        with pytest.raises(ObjectChangedError, match=r"large\.bin: another version"):
            read_bytes(handle, 200_000, 3)
    assert store.stat("large.bin").identity != handle.entry.identity


def test_large_object_replaced_after_the_listing_is_told(bucket):
    store = store_at(f"s3://{bucket}/run")
    list(store.list(""))
    s3.put(f"s3://{bucket}/run/large.bin", LARGE[::-1])
    with store.open("large.bin") as handle, pytest.raises(ObjectChangedError):
        read_bytes(handle, 0, 3)


def test_small_object_is_read_as_it_is_when_opened(bucket):
    store = store_at(f"s3://{bucket}/run")
    list(store.list(""))
    s3.put(f"s3://{bucket}/run/small.bin", b"pointer")
    with store.open("small.bin") as handle:
        assert read_bytes(handle, 0, handle.entry.num_bytes) == b"pointer"


def test_a_store_is_shipped_without_credentials(bucket, monkeypatch):
    shipped = pickle.dumps(store_at(f"s3://{bucket}/run"))
    assert all(value.encode() not in shipped for value in s3.KEYS.values())
    assert pickle.loads(shipped).stat("small.bin").num_bytes == 5


def test_walk_comes_in_order_and_goes_on_after_a_name(bucket):
    for number in range(5):
        s3.put(f"s3://{bucket}/run/step{number}/file", b"x")
    store = store_at(f"s3://{bucket}/run")
    names = [entry.name for entry in store.walk()]
    assert names == sorted(names)
    assert names == ["large.bin", "small.bin", *(f"step{n}/file" for n in range(5))]
    assert [entry.name for entry in store.walk(after="step1/file")] == ["step2/file", "step3/file", "step4/file"]


def test_markers_of_empty_folders_are_no_files(bucket):
    s3.request("PUT", f"/{bucket}/run/empty/", b"")
    store = store_at(f"s3://{bucket}/run")
    assert store.stat("empty").is_folder
    assert list(store.list("empty")) == []
    assert "empty" in {entry.name for entry in store.list("") if entry.is_folder}


def test_nothing_is_asked_beyond_the_end(bucket):
    with store_at(f"s3://{bucket}/run").open("small.bin") as handle, pytest.raises(ShortReadError):
        read_bytes(handle, 4, 2)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "names no bucket"), ("s3://a/b//c", "empty parts"), ("s3://a/../c", "empty parts"),
        ("ftp://host/x", "not read"), ("file://host/x", "file:///path"),
        ("s3://KEYID:SECRET@bucket/run", "credentials don't belong in a URL"),
    ],
)  # fmt: skip
def test_wrong_urls_are_wrong_usage_and_their_secrets_are_not_said(url, says):
    pytest.importorskip("obstore")
    with pytest.raises(UsageError, match=says) as caught:
        store_at(url)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_file_urls_are_local(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert store_at(f"file://{tmp_path}").stat("x").num_bytes == 3


def test_no_server_is_no_missing_object_and_says_no_secret(monkeypatch):
    pytest.importorskip("obstore")
    s3.use(monkeypatch, f"http://127.0.0.1:{s3.free_port()}")
    from auditor.storage import object_clients

    monkeypatch.setitem(object_clients.RETRIES, "max_retries", 0)
    with pytest.raises(StorageError, match="no connection") as caught:
        open_store(["s3://bucket/run"])
    text = "".join(traceback.format_exception(caught.value))
    assert not isinstance(caught.value, ObjectMissingError | AccessDeniedError)
    assert all(value not in text for value in s3.KEYS.values() if value != "us-east-1")


@pytest.mark.parametrize(
    ("tag", "asked"),
    [('"0x1B"', '"0x1B"'), ("0x1B", '"0x1B"'), ('W/"x"', ""), (None, "")],
    ids=["quoted", "unquoted in listings", "weak", "none"],
)
def test_versions_are_told_alike_however_a_service_writes_them(bucket, tag, asked):
    from datetime import UTC, datetime

    from auditor.storage.object_store import _tag

    store = store_at(f"s3://{bucket}/run")
    meta = {
        "path": "run/x",
        "size": 5,
        "e_tag": tag,
        "last_modified": datetime.fromtimestamp(1e9, UTC),
        "version": None,
    }
    assert _tag(store._entry(meta).identity) == asked
