"""What every store promises, and what the ones that wrap others add."""

import errno
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.storage import local, retrying
from auditor.storage.faulty import Faults, FaultyStore
from auditor.storage.local import BULK_BYTES, LocalStore
from auditor.storage.memory import MemoryStore
from auditor.storage.retrying import RetryingStore
from auditor.storage.roots import store_at
from auditor.storage.store import (
    AccessDeniedError,
    ObjectMissingError,
    ShortReadError,
    StorageError,
    TransientReadError,
    base_name,
    descriptor_of,
    join,
    read_bytes,
    read_text,
)
from tests import s3

OBJECTS = {
    "top.bin": bytes(range(256)),
    "empty": b"",
    "folder/a": b"aaaa",
    "folder/b": b"bb",
    "folder/deeper/c": b"c",
    "folder2/é [31m": b"odd name",
}


def memory_store(tmp_path):
    return MemoryStore(OBJECTS, "here")


def local_store(tmp_path):
    for name, content in OBJECTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return LocalStore(tmp_path)


def object_store(path):
    bucket = s3.new_bucket()
    for name, content in OBJECTS.items():
        s3.put(f"s3://{bucket}/a prefix/{name}", content)
    s3.put(f"s3://{bucket}/a prefix2/other", b"not below the prefix")
    return store_at(f"s3://{bucket}/a prefix")


@pytest.fixture(
    params=[
        local_store,
        memory_store,
        lambda path: RetryingStore(local_store(path)),
        lambda path: FaultyStore(memory_store(path), Faults()),
        object_store,
    ],
    ids=["local", "memory", "retrying", "faulty", "s3"],
)
def store(request, tmp_path, monkeypatch):
    if request.param is object_store:
        s3.use(monkeypatch)
    return request.param(tmp_path)


def failing_os(monkeypatch, function, code):
    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.os, function, fail)


# The contract


@pytest.mark.parametrize(
    ("folder", "files", "folders"),
    [
        ("", {"top.bin", "empty"}, {"folder", "folder2"}),
        ("folder", {"folder/a", "folder/b"}, {"folder/deeper"}),
        ("folder/deeper", {"folder/deeper/c"}, set()),
        ("folder2", {"folder2/é [31m"}, set()),
    ],
)
def test_list_names_direct_entries(store, folder, files, folders):
    entries = list(store.list(folder))
    assert {entry.name for entry in entries if not entry.is_folder} == files
    assert {entry.name for entry in entries if entry.is_folder} == folders
    assert len(entries) == len(files | folders)
    assert {entry.name: entry.num_bytes for entry in entries if not entry.is_folder} == {
        n: len(OBJECTS[n]) for n in files
    }


def test_listed_entries_are_those_of_stat(store):
    for entry in store.list("folder"):
        assert store.stat(entry.name) == entry


@pytest.mark.parametrize("name", OBJECTS)
def test_stat_of_an_object(store, name):
    entry = store.stat(name)
    assert (entry.name, entry.is_folder, entry.num_bytes) == (name, False, len(OBJECTS[name]))
    assert entry.identity
    assert store.stat(name).identity == entry.identity


@pytest.mark.parametrize("name", ["", "folder", "folder/deeper"])
def test_stat_of_a_folder(store, name):
    entry = store.stat(name)
    assert (entry.name, entry.is_folder) == (name, True)


@pytest.mark.parametrize("name", ["no", "folder/no", "no/no", "top.bin/no", "fold"])
def test_missing_objects(store, name):
    with pytest.raises(ObjectMissingError, match=name):
        store.stat(name)
    with pytest.raises(ObjectMissingError, match=name), store.open(name):
        pass
    with pytest.raises(ObjectMissingError, match=name):
        list(store.list(name))


@pytest.mark.parametrize("make", [local_store, memory_store])
def test_names_with_control_characters_are_names(make, tmp_path):
    name = "odd/\x1b[31m"
    (tmp_path / "odd").mkdir()
    (tmp_path / name).write_bytes(b"x")
    inner = make(tmp_path) if make is local_store else MemoryStore({name: b"x"})
    assert [entry.name for entry in inner.list("odd")] == [name]


def test_listing_an_object_fails(store):
    with pytest.raises(StorageError, match=r"top\.bin"):
        list(store.list("top.bin"))


def test_opening_a_folder_fails(store):
    with pytest.raises(StorageError, match="folder"), store.open("folder"):
        pass


@pytest.mark.parametrize("name", OBJECTS)
def test_open_shows_the_entry_and_reads_the_whole(store, name):
    with store.open(name) as handle:
        assert handle.entry == store.stat(name)
        assert read_bytes(handle, 0, handle.entry.num_bytes) == OBJECTS[name]


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 256), (255, 1), (17, 100), (0, 0), (256, 0)])
def test_reads_of_ranges(store, offset, length):
    with store.open("top.bin") as handle:
        assert read_bytes(handle, offset, length) == OBJECTS["top.bin"][offset : offset + length]


def test_read_into_fills_the_given_part_of_a_buffer_alone(store):
    buffer = bytearray(b"." * 10)
    with store.open("top.bin") as handle:
        handle.read_into(65, memoryview(buffer)[3:6])
    assert buffer == b"...ABC...."


@pytest.mark.parametrize(("offset", "length"), [(0, 257), (255, 2), (256, 1), (1 << 40, 1)])
def test_short_reads(store, offset, length):
    with store.open("top.bin") as handle, pytest.raises(ShortReadError, match=rf"top\.bin.*256|top\.bin.*{offset}"):
        read_bytes(handle, offset, length)


def test_two_handles_do_not_disturb_each_other(store):
    with store.open("folder/a") as one, store.open("folder/b") as other:
        assert read_bytes(one, 1, 2) + read_bytes(other, 0, 2) + read_bytes(one, 0, 1) == b"aabba"


def test_reads_from_several_threads(store):
    wrong = []

    def work(handle, start):
        wrong.extend(at for at in range(start, 256, 4) if read_bytes(handle, at, 1) != bytes([at]))

    with store.open("top.bin") as handle:
        threads = [threading.Thread(target=work, args=(handle, start)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_every_error_is_the_auditors_and_a_usual_one(store):
    with pytest.raises(FileNotFoundError):
        store.stat("no")
    with pytest.raises(AuditorError):
        store.stat("no")
    with store.open("empty") as handle, pytest.raises(EOFError):
        read_bytes(handle, 0, 1)


def test_names_with_a_null_byte_are_refused(store):
    with pytest.raises(StorageError):
        store.stat("a\0b")
    with pytest.raises(StorageError), store.open("a\0b"):
        pass


def test_listing_a_name_with_a_null_byte_is_refused(store):
    with pytest.raises(StorageError):
        list(store.list("a\0b"))


def test_read_text_stops_at_its_limit_and_replaces_what_is_no_text(store):
    assert read_text(store, "folder/a", limit=3) == "aaa"
    assert read_text(store, "empty") == ""
    assert read_text(store, "top.bin").startswith("\0\1\2")
    assert "\ufffd" in read_text(store, "top.bin")


def test_names_are_joined_with_slashes():
    assert join("", "a") == "a"
    assert join("a/b", "c") == "a/b/c"
    assert base_name("a/b/c") == "c"


# On disk


def test_local_location_is_as_given(tmp_path):
    assert LocalStore(tmp_path).location == str(tmp_path)
    assert LocalStore("some/where").location == "some/where"


def test_local_root_that_is_missing():
    with pytest.raises(ObjectMissingError, match="no/where"):
        list(LocalStore("no/where").list(""))


def test_local_empty_folder_lists_nothing(tmp_path):
    assert list(LocalStore(tmp_path).list("")) == []


def test_local_identity_changes_with_the_content(tmp_path):
    store = local_store(tmp_path)
    seen = {store.stat("top.bin").identity}
    (tmp_path / "top.bin").write_bytes(b"shorter")
    seen.add(store.stat("top.bin").identity)
    os.utime(tmp_path / "top.bin", ns=(1, 1))
    seen.add(store.stat("top.bin").identity)
    (tmp_path / "new").write_bytes(b"shorter")
    os.utime(tmp_path / "new", ns=(1, 1))
    (tmp_path / "new").replace(tmp_path / "top.bin")
    seen.add(store.stat("top.bin").identity)
    assert len(seen) == 4


def test_local_handle_shows_the_file_as_of_the_opening(tmp_path):
    store = local_store(tmp_path)
    with store.open("top.bin") as handle:
        before = handle.entry
        (tmp_path / "top.bin").write_bytes(b"short")
        assert handle.entry == before != store.stat("top.bin")
        with pytest.raises(ShortReadError, match="ends at byte 5, 256 wanted"):
            read_bytes(handle, 0, 256)


def test_local_modified_is_the_files_time(tmp_path):
    store = local_store(tmp_path)
    os.utime(tmp_path / "top.bin", (1000, 2000))
    assert store.stat("top.bin").modified == 2000


def test_local_reads_on_after_partial_reads(tmp_path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(local.os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    with local_store(tmp_path).open("top.bin") as handle:
        assert read_bytes(handle, 3, 100) == OBJECTS["top.bin"][3:103]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_local_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    store, done = LocalStore(tmp_path), []

    def work():
        assert [entry.name for entry in store.list("")] == ["pipe"]
        try:
            with store.open("pipe"):
                pass
        except StorageError as error:
            done.append(str(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert done == ["pipe: not a regular file"]


def test_local_device_is_no_regular_file():
    with pytest.raises(StorageError, match="not a regular file"), LocalStore("/dev").open("null"):
        pass


def test_local_link_is_followed(tmp_path):
    store = local_store(tmp_path)
    (tmp_path / "link").symlink_to("top.bin")
    (tmp_path / "folder link").symlink_to("folder")
    assert store.stat("link").num_bytes == 256
    assert store.stat("folder link").is_folder
    assert {entry.name for entry in store.list("folder link")} >= {"folder link/a", "folder link/b"}
    with store.open("link") as handle:
        assert read_bytes(handle, 0, 2) == b"\0\1"


def test_local_dangling_link_is_listed_and_missing(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_bytes(b"x")
    store = LocalStore(tmp_path)
    entries = {entry.name: entry for entry in store.list("")}
    assert set(entries) == {"dangling", "file"}
    assert (entries["dangling"].is_folder, entries["dangling"].num_bytes, entries["dangling"].identity) == (
        False,
        0,
        "",
    )
    with pytest.raises(ObjectMissingError):
        store.stat("dangling")
    with pytest.raises(ObjectMissingError), store.open("dangling"):
        pass


def test_local_link_to_itself_is_listed_and_can_not_be_read(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    store = LocalStore(tmp_path)
    (entry,) = store.list("")
    assert (entry.name, entry.is_folder, entry.identity) == ("loop", False, "unreadable")
    with pytest.raises(StorageError), store.open("loop"):
        pass


def test_local_file_that_goes_away_while_listing_stays_an_entry(tmp_path, monkeypatch):
    store = local_store(tmp_path)
    failing_os(monkeypatch, "stat", errno.ENOENT)
    assert {entry.identity for entry in store.list("folder")} == {""}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, AccessDeniedError), (errno.EPERM, AccessDeniedError), (errno.ENOENT, ObjectMissingError),
        (errno.ENOTDIR, ObjectMissingError), (errno.EIO, TransientReadError), (errno.ESTALE, TransientReadError),
        (errno.ETIMEDOUT, TransientReadError), (errno.ENAMETOOLONG, StorageError), (errno.EMFILE, StorageError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("function", ["open", "stat", "preadv", "scandir"])
def test_local_errors_of_the_system_are_explained(tmp_path, monkeypatch, function, code, kind):
    store = local_store(tmp_path)
    with store.open("top.bin") as handle:
        act = {
            "open": lambda: store.open("top.bin").__enter__(),
            "stat": lambda: store.stat("top.bin"),
            "preadv": lambda: read_bytes(handle, 0, 1),
            "scandir": lambda: list(store.list("folder")),
        }
        failing_os(monkeypatch, function, code)
        with pytest.raises(kind, match=os.strerror(code)) as caught:
            act[function]()
    assert type(caught.value) is kind


def test_local_closes_what_it_opens(tmp_path, monkeypatch):
    store, closed = local_store(tmp_path), []
    real = os.close
    monkeypatch.setattr(local.os, "close", lambda descriptor: (closed.append(descriptor), real(descriptor)))
    with store.open("top.bin") as handle:
        pass
    assert closed == [handle.descriptor]
    with pytest.raises(StorageError), store.open("folder"):
        pass
    assert len(closed) == 2


def as_nobody(check) -> str:
    """What ``check`` says when it runs without root's right to read everything."""
    if os.geteuid() != 0:
        return check()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # The child does nothing that other threads' locks could keep it from.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            answer = check()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write_end, answer.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


@pytest.fixture
def open_folder():
    """A folder that everybody may enter: ``tmp_path`` is its owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="stores"))
    folder.chmod(0o755)
    yield folder
    for locked in folder.iterdir():
        locked.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no other user to be here")
def test_local_permission_denied(open_folder):
    (open_folder / "secret").write_bytes(b"x")
    (open_folder / "secret").chmod(0)
    (open_folder / "plain").write_bytes(b"plain")
    (open_folder / "plain").chmod(stat.S_IRUSR | stat.S_IROTH)
    (open_folder / "closed").mkdir()
    (open_folder / "closed" / "inner").write_bytes(b"x")
    (open_folder / "closed").chmod(0)
    store = LocalStore(open_folder)

    def attempt(action) -> str:
        try:
            return str(action())
        except StorageError as error:
            return f"{type(error).__name__} {error}"

    def content(name) -> str:
        with store.open(name) as handle:
            return read_bytes(handle, 0, handle.entry.num_bytes).decode()

    def check() -> str:
        return "\n".join(
            [
                attempt(lambda: content("plain")),
                attempt(lambda: content("secret")),
                attempt(lambda: store.stat("secret").num_bytes),
                attempt(lambda: list(store.list("closed"))),
                attempt(lambda: store.stat("closed/inner")),
                attempt(lambda: sorted(entry.name for entry in store.list(""))),
            ]
        )

    denied = os.strerror(errno.EACCES)
    assert as_nobody(check).splitlines() == [
        "plain", f"AccessDeniedError secret: {denied}", "1", f"AccessDeniedError closed: {denied}",
        f"AccessDeniedError closed/inner: {denied}", "['closed', 'plain', 'secret']",
    ]  # fmt: skip


# In memory


def test_memory_identity_is_that_of_the_bytes():
    store = MemoryStore({"a": b"one"})
    before = store.stat("a").identity
    store.objects["a"] = b"two"
    assert store.stat("a").identity != before


def test_memory_store_does_not_follow_changes_of_the_mapping_it_was_made_from():
    objects = {"a": b"one"}
    store = MemoryStore(objects, "there")
    objects["b"] = b"two"
    assert [entry.name for entry in store.list("")] == ["a"]
    assert store.location == "there"


# Trying again


@pytest.fixture
def waits(monkeypatch):
    """The waits that were asked for; nobody waits."""
    asked = []
    monkeypatch.setattr(retrying.time, "sleep", asked.append)
    return asked


@pytest.mark.parametrize("num_failures", range(6))
def test_retrying_tries_as_often_as_it_says(waits, num_failures):
    faulty = FaultyStore(MemoryStore(OBJECTS), Faults(transient="*", num_transient=num_failures))
    faulty.faults.seconds_per_read = 0.0
    with RetryingStore(faulty, num_attempts=4, first_wait_seconds=1.0).open("top.bin") as handle:
        waits.clear()
        if num_failures < 4:
            assert read_bytes(handle, 5, 3) == OBJECTS["top.bin"][5:8]
        else:
            with pytest.raises(TransientReadError, match=r"top\.bin"):
                read_bytes(handle, 5, 3)
    assert faulty.faults.reads["top.bin"] == min(num_failures + 1, 4)
    assert [wait for wait in waits if wait] == [1.0, 2.0, 4.0][: min(num_failures, 3)]


def test_retrying_counts_each_read_anew(waits):
    faulty = FaultyStore(MemoryStore(OBJECTS), Faults(transient="*", num_transient=3))
    with RetryingStore(faulty).open("top.bin") as handle:
        assert read_bytes(handle, 0, 1) == b"\0"
        assert read_bytes(handle, 1, 1) == b"\1"
    assert faulty.faults.reads["top.bin"] == 5


def test_retrying_does_not_try_what_will_not_pass_again(waits):
    faulty = FaultyStore(MemoryStore(OBJECTS), Faults())
    with RetryingStore(faulty).open("top.bin") as handle, pytest.raises(ShortReadError):
        read_bytes(handle, 0, 1000)
    assert faulty.faults.reads["top.bin"] == 1
    faulty.faults.denied = "*"
    with pytest.raises(AccessDeniedError), RetryingStore(faulty).open("top.bin"):
        pass
    assert not any(waits)


def test_retrying_shows_the_wrapped_store(tmp_path):
    inner = local_store(tmp_path)
    store = RetryingStore(inner)
    assert store.location == inner.location
    with store.open("top.bin") as handle:
        assert handle.entry == inner.stat("top.bin")


@pytest.mark.parametrize("function", ["open", "stat", "scandir"])
def test_retrying_tries_opening_and_listing_again(tmp_path, monkeypatch, waits, function):
    store, real, calls = RetryingStore(local_store(tmp_path)), getattr(os, function), []

    def flaky(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments, **options)

    monkeypatch.setattr(local.os, function, flaky)
    if function == "open":
        with store.open("top.bin") as handle:
            assert read_bytes(handle, 0, 1) == b"\0"
    elif function == "stat":
        assert store.stat("top.bin").num_bytes == 256
    else:
        assert list(store.list("folder"))


# Misbehaving on request


def test_faulty_without_faults_counts_reads_and_bytes():
    store = FaultyStore(MemoryStore(OBJECTS), Faults())
    with store.open("top.bin") as handle:
        read_bytes(handle, 0, 10)
        read_bytes(handle, 5, 7)
    assert (store.faults.reads["top.bin"], store.faults.num_bytes_read["top.bin"]) == (2, 17)
    assert store.faults.reads["empty"] == 0


def test_faulty_denies_by_pattern():
    store = FaultyStore(MemoryStore(OBJECTS), Faults(denied="folder/*"))
    with pytest.raises(AccessDeniedError, match="folder/a"), store.open("folder/a"):
        pass
    with store.open("top.bin") as handle:
        assert read_bytes(handle, 0, 1) == b"\0"


def test_faulty_shrinks_once_it_was_read():
    store = FaultyStore(MemoryStore(OBJECTS), Faults(shrinking="top.bin", num_bytes_left=100))
    before = store.stat("top.bin")
    assert before.num_bytes == 256
    with store.open("top.bin") as handle:
        assert read_bytes(handle, 0, 100) == OBJECTS["top.bin"][:100]
        with pytest.raises(ShortReadError, match="ends at byte 100, 101 wanted"):
            read_bytes(handle, 1, 100)
    after = store.stat("top.bin")
    assert after.num_bytes == 100
    assert after.identity != before.identity
    assert store.stat("folder/a").identity == store.inner.stat("folder/a").identity


def test_faulty_flips_the_lowest_bit_of_every_byte():
    store = FaultyStore(MemoryStore(OBJECTS), Faults(flipped="top.bin"))
    with store.open("top.bin") as handle:
        assert read_bytes(handle, 4, 4) == bytes([5, 4, 7, 6])
    with store.open("folder/a") as handle:
        assert read_bytes(handle, 0, 4) == b"aaaa"


def test_faulty_waits_at_every_read(monkeypatch):
    asked = []
    monkeypatch.setattr(time, "sleep", asked.append)
    with FaultyStore(MemoryStore(OBJECTS), Faults(seconds_per_read=0.5)).open("top.bin") as handle:
        read_bytes(handle, 0, 1)
        read_bytes(handle, 1, 1)
    assert asked == [0.5, 0.5]


def test_large_files_are_read_past_without_pushing_others_out_of_memory(tmp_path, monkeypatch):
    """Also where the compiled kernels read by the descriptor alone."""
    (tmp_path / "large").write_bytes(bytes(BULK_BYTES))
    (tmp_path / "small").write_bytes(bytes(10))
    advised = []
    monkeypatch.setattr(os, "posix_fadvise", lambda number, *rest: advised.append((number, rest)))
    store = LocalStore(tmp_path)
    with store.open("large") as large, store.open("small"):
        assert advised == [(descriptor_of(large), (0, 0, os.POSIX_FADV_NOREUSE))]
