"""The zip directory reader against Python's zipfile, and against files that are cut, crafted or nonsense."""

import io
import struct
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auditor.containers.damage import DamagedError, LimitError
from auditor.containers.zip_directory import MAX_DIRECTORY_BYTES, Member, read_directory
from auditor.storage.memory import MemoryStore
from tests.sparse_file import Sparse

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "deepspeed_pipeline"
SMALL = FIXTURES / "tp4" / "global_step6" / "layer_06-model_00-model_states.pt"

LOCAL, CENTRAL, END = "<4s5H3I2H", "<4s6H3I5H2I", "<4s4H2IH"
END64, LOCATOR = "<4sQ2H2I4Q", "<4sIQI"


def directory_of(content: bytes) -> dict[str, Member]:
    with MemoryStore({"file": content}).open("file") as handle:
        return read_directory(handle)


def assert_same_as_zipfile(content: bytes) -> None:
    members = directory_of(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert list(members) == archive.namelist()
        for info in archive.infolist():
            member = members[info.filename]
            assert content[member.offset : member.offset + member.num_bytes] == archive.read(info)
            assert (member.header, member.num_bytes, member.crc32) == (info.header_offset, info.file_size, info.CRC)


def local(name: bytes, data: bytes, *, flags: int = 0, extra: bytes = b"") -> bytes:
    head = struct.pack(LOCAL, b"PK\3\4", 20, flags, 0, 0, 0, 0, len(data), len(data), len(name), len(extra))
    return head + name + extra + data


def central(
    name: bytes, size: int, header: int, *, flags: int = 0, method: int = 0, packed: int | None = None,
    extra: bytes = b"", comment: bytes = b"",
) -> bytes:  # fmt: skip
    packed = size if packed is None else packed
    return struct.pack(
        CENTRAL, b"PK\1\2", 20, 20, flags, method, 0, 0, 0, packed, size, len(name), len(extra), len(comment), 0, 0, 0,
        header,
    ) + name + extra + comment  # fmt: skip


def end(count: int, length: int, start: int, comment: bytes = b"") -> bytes:
    return struct.pack(END, b"PK\5\6", 0, 0, count, count, length, start, len(comment)) + comment


def end64(count: int, length: int, start: int, at: int) -> bytes:
    """The zip64 end record, to be put at byte ``at``, and its locator."""
    record = struct.pack(END64, b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
    return record + struct.pack(LOCATOR, b"PK\6\7", 0, at, 1)


def archive(bodies: bytes, entries: list[bytes], comment: bytes = b"") -> bytes:
    directory = b"".join(entries)
    return bodies + directory + end(len(entries), len(directory), len(bodies), comment)


# Sound files


@pytest.mark.parametrize("path", sorted((FIXTURES / "tp4" / "global_step6").glob("*_0[01]*_states.pt")), ids=str)
def test_real_files_read_as_zipfile_reads_them(path):
    assert_same_as_zipfile(path.read_bytes())


@pytest.mark.parametrize("to_file", [True, False])
def test_torch_files_read_as_zipfile_reads_them(tmp_path, to_file):
    torch = pytest.importorskip("torch")
    tree = {"a": torch.arange(1000.0), "b": torch.ones(3, 5, dtype=torch.bfloat16), "none": torch.zeros(0)}
    if to_file:
        torch.save(tree, tmp_path / "file.pt")
        content = (tmp_path / "file.pt").read_bytes()
    else:
        buffer = io.BytesIO()
        torch.save(tree, buffer)
        content = buffer.getvalue()
    assert_same_as_zipfile(content)
    root = "file" if to_file else "archive"
    assert {f"{root}/data.pkl", f"{root}/data/0", f"{root}/data/1", f"{root}/data/2"} <= directory_of(content).keys()


@given(st.dictionaries(st.text(min_size=1, max_size=40).filter(lambda s: s.isprintable()), st.binary(max_size=300)),
       st.binary(max_size=50), st.booleans(), st.booleans())  # fmt: skip
@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
def test_stored_zip_files_read_as_zipfile_reads_them(content, comment, wide, streamed):
    comment = comment.replace(b"PK", b"..")
    target = io.BytesIO()
    sink = Unseekable(target) if streamed else target
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as writer:
        writer.comment = comment
        for name, data in content.items():
            with writer.open(zipfile.ZipInfo(name), "w", force_zip64=wide) as member:
                member.write(data)
    assert_same_as_zipfile(target.getvalue())


class Unseekable(io.RawIOBase):
    """Makes zipfile write data descriptors, as streaming writers do."""

    def __init__(self, target: io.BytesIO) -> None:
        self.target = target

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data) -> int:
        return self.target.write(data)


def test_padding_of_the_local_header_alone_moves_the_data():
    content = archive(local(b"a", b"xyz", extra=b"FB" + struct.pack("<H", 60) + bytes(60)), [central(b"a", 3, 0)])
    assert directory_of(content)["a"].offset == struct.calcsize(LOCAL) + 1 + 64


def test_sizes_and_offset_from_the_zip64_field():
    first, second = local(b"a", b"xyz"), local(b"b", b"hello")
    wide = struct.pack("<2H3Q", 1, 24, 5, 5, len(first))
    other = struct.pack("<2H", 0x4242, 3) + b"abc"
    entry = central(b"b", 0xFFFFFFFF, 0xFFFFFFFF, extra=other + wide)
    members = directory_of(archive(first + second, [central(b"a", 3, 0), entry]))
    assert members["b"] == Member("b", len(first), len(first) + struct.calcsize(LOCAL) + 1, 5, 0)


def test_only_the_offset_from_the_zip64_field():
    entry = central(b"a", 3, 0xFFFFFFFF, extra=struct.pack("<2HQ", 1, 8, 0))
    assert directory_of(archive(local(b"a", b"xyz"), [entry]))["a"].header == 0


def test_zip64_end_record_counts_when_the_end_record_is_all_ones():
    body, entry = local(b"a", b"xyz"), central(b"a", 3, 0)
    content = body + entry + end64(1, len(entry), len(body), len(body + entry))
    content += end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    assert directory_of(content)["a"].num_bytes == 3


def test_member_beyond_four_gigabytes():
    at, size = 5 << 30, 6 << 30
    head = struct.pack(LOCAL, b"PK\3\4", 45, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 1, 0) + b"a"
    start = at + len(head) + size
    entry = central(b"a", 0xFFFFFFFF, 0xFFFFFFFF, extra=struct.pack("<2H3Q", 1, 24, size, size, at))
    tail = entry + end64(1, len(entry), start, start + len(entry)) + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    members = read_directory(Sparse(start + len(tail), {at: head, start: tail}))
    assert members == {"a": Member("a", at, at + len(head), size, 0)}


def test_archive_without_members():
    assert directory_of(archive(b"", [])) == {}


def test_archive_comment_and_member_comment():
    members = directory_of(archive(local(b"a", b"x"), [central(b"a", 1, 0, comment=b"why")], comment=b"because"))
    assert list(members) == ["a"]


# Files that are cut short


def boundaries(content: bytes) -> dict[int, str]:
    """Every offset at which a part of the file begins or ends, with its name."""
    found = {0: "nothing", len(content) - 1: "all but one byte"}
    with zipfile.ZipFile(io.BytesIO(content)) as reader:
        infos, start = reader.infolist(), reader.start_dir
    for info in infos:
        name_length, extra_length = struct.unpack_from("<2H", content, info.header_offset + 26)
        name_end = info.header_offset + struct.calcsize(LOCAL) + name_length
        data_end = name_end + extra_length + info.file_size
        found[info.header_offset] = f"before {info.filename}"
        found[info.header_offset + 4] = f"after the signature of {info.filename}"
        found[name_end - name_length] = f"before the name of {info.filename}"
        found[name_end] = f"after the name of {info.filename}"
        found[name_end + extra_length] = f"before the data of {info.filename}"
        found[data_end] = f"after the data of {info.filename}"
        following = min(o for o in [*(other.header_offset for other in infos), start] if o >= data_end)
        assert following - data_end in (0, 16, 24)
        found[following] = f"after the descriptor of {info.filename}"
    at = start
    while content[at : at + 4] == b"PK\1\2":
        found[at] = "before an entry of the directory"
        name_length, extra_length, comment_length = struct.unpack_from("<3H", content, at + 28)
        found[at + struct.calcsize(CENTRAL)] = "before a name in the directory"
        found[at + struct.calcsize(CENTRAL) + name_length] = "after a name in the directory"
        at += struct.calcsize(CENTRAL) + name_length + extra_length + comment_length
    assert content[at : at + 4] == b"PK\6\6"
    found[at] = "before the zip64 end record"
    found[at + struct.calcsize(END64)] = "before the locator"
    found[at + struct.calcsize(END64) + struct.calcsize(LOCATOR)] = "before the end record"
    found[at + struct.calcsize(END64) + struct.calcsize(LOCATOR) + 4] = "after the signature of the end record"
    assert all(offset < len(content) for offset in found)
    return dict(sorted(found.items()))


def is_damaged(content: bytes) -> bool:
    try:
        directory_of(content)
    except DamagedError:
        return True
    return False


def test_cut_at_every_structural_boundary_is_damaged(capsys):
    content = SMALL.read_bytes()
    cuts = boundaries(content)
    unnoticed = [f"{where} (byte {length})" for length, where in cuts.items() if not is_damaged(content[:length])]
    with capsys.disabled():
        print(f"{len(cuts)} structural boundaries of {SMALL.name}, not noticed: {unnoticed}")  # noqa: T201
    assert len(cuts) > 60
    assert not unnoticed


def test_cut_at_every_byte_is_damaged():
    content = SMALL.read_bytes()
    assert all(is_damaged(content[:length]) for length in range(len(content)))


def test_empty_file_is_damaged():
    with pytest.raises(DamagedError, match="empty"):
        directory_of(b"")


def test_file_of_zeros_as_long_as_the_real_one_is_damaged():
    with pytest.raises(DamagedError, match="does not begin as a zip file"):
        directory_of(bytes(SMALL.stat().st_size))


def test_zero_filled_tail_is_damaged():
    content = SMALL.read_bytes()
    with pytest.raises(DamagedError, match="cut short"):
        directory_of(content[:1000] + bytes(len(content) - 1000))


def test_trailing_bytes_are_damage():
    with pytest.raises(DamagedError, match="1 bytes follow its end record"):
        directory_of(SMALL.read_bytes() + b"\0")


def test_two_files_one_after_the_other_are_damage():
    with pytest.raises(DamagedError):
        directory_of(SMALL.read_bytes() * 2)


# Records that lie


def test_duplicate_names_are_damage():
    body = local(b"a", b"x")
    content = archive(body * 2, [central(b"a", 1, 0), central(b"a", 1, len(body))])
    with pytest.raises(DamagedError, match="two members are called 'a'"):
        directory_of(content)


def test_overlapping_members_are_damage():
    inner = local(b"b", b"y")
    content = archive(local(b"a", inner), [central(b"a", len(inner), 0), central(b"b", 1, struct.calcsize(LOCAL) + 1)])
    with pytest.raises(DamagedError, match="'a' and 'b' overlap"):
        directory_of(content)


def test_two_names_for_one_header_are_damage():
    with pytest.raises(DamagedError, match="calls itself 'a', not 'b'"):
        directory_of(archive(local(b"a", b"x"), [central(b"a", 1, 0), central(b"b", 1, 0)]))


def test_compressed_member_is_damage():
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as writer:
        writer.writestr("a", b"x" * 1000)
    with pytest.raises(DamagedError, match="'a' is compressed"):
        directory_of(target.getvalue())


def test_stored_member_of_two_sizes_is_damage():
    with pytest.raises(DamagedError):
        directory_of(archive(local(b"a", b"xyz"), [central(b"a", 3, 0, packed=2)]))


def test_encrypted_member_is_damage():
    with pytest.raises(DamagedError, match="'a' is encrypted"):
        directory_of(archive(local(b"a", b"x", flags=1), [central(b"a", 1, 0, flags=1)]))


def test_other_name_in_the_local_header_is_damage():
    with pytest.raises(DamagedError, match="calls itself 'b', not 'a'"):
        directory_of(archive(local(b"b", b"x"), [central(b"a", 1, 0)]))


def test_header_that_is_none_is_damage():
    with pytest.raises(DamagedError, match="no member header at byte 1"):
        directory_of(archive(local(b"a", b"x" * 40), [central(b"a", 1, 1)]))


def test_header_inside_the_directory_is_damage():
    body = local(b"a", b"x")
    with pytest.raises(DamagedError, match="inside the directory"):
        directory_of(archive(body, [central(b"a", 1, len(body))]))


def test_data_that_reaches_into_the_directory_is_damage():
    with pytest.raises(DamagedError, match="into the directory"):
        directory_of(archive(local(b"a", b"x"), [central(b"a", 2, 0)]))


def test_local_name_that_runs_out_of_the_file_is_damage():
    head = struct.pack(LOCAL, b"PK\3\4", 20, 0, 0, 0, 0, 0, 1, 1, 0xFFFF, 0)
    with pytest.raises(DamagedError):
        directory_of(archive(head + b"ax", [central(b"a", 1, 0)]))


def test_huge_directory_length_claim_is_damage():
    body, entry = local(b"a", b"x"), central(b"a", 1, 0)
    with pytest.raises(DamagedError, match="its directory is said to lie at"):
        directory_of(body + entry + end(1, 0xFFFFFFFE, len(body)))


def test_huge_directory_length_claim_in_a_zip64_record_is_damage():
    body, entry = local(b"a", b"x"), central(b"a", 1, 0)
    wide = end64(1, 1 << 63, len(body), len(body + entry))
    with pytest.raises(DamagedError, match="its directory is said to lie at"):
        directory_of(body + entry + wide + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF))


def test_directory_longer_than_the_limit_is_given_up_before_it_is_read():
    size = 1 << 50
    tail = end64(1, size, 0, size) + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    with pytest.raises(LimitError, match=str(MAX_DIRECTORY_BYTES)):
        read_directory(Sparse(size + len(tail), {size: tail}))


def test_wrong_entry_count_is_damage():
    body, entry = local(b"a", b"x"), central(b"a", 1, 0)
    for count in (0, 2):
        with pytest.raises(DamagedError, match=f"1 entries, its end record says {count}"):
            directory_of(body + entry + end(count, len(entry), len(body)))


def test_directory_length_that_ends_inside_an_entry_is_damage():
    body, entry = local(b"a", b"x"), central(b"a", 1, 0)
    for length in range(1, len(entry)):
        with pytest.raises(DamagedError):
            directory_of(body + entry + end(1, length, len(body)))


def test_all_ones_without_zip64_record_are_damage():
    with pytest.raises(DamagedError, match="zip64 record that is not there"):
        directory_of(local(b"a", b"x") + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF))


def test_all_ones_without_zip64_field_are_damage():
    with pytest.raises(DamagedError, match="zip64 field that is not there"):
        directory_of(archive(local(b"a", b"x"), [central(b"a", 0xFFFFFFFF, 0)]))


def test_zip64_field_that_is_too_short_is_damage():
    with pytest.raises(DamagedError):
        directory_of(archive(local(b"a", b"x"), [central(b"a", 0xFFFFFFFF, 0, extra=struct.pack("<2H", 1, 24))]))


@pytest.mark.parametrize("at", [1, 0xFFFFFFFFFFFFFFFF])
def test_locator_that_points_nowhere_is_damage(at):
    body, entry = local(b"a", b"x"), central(b"a", 1, 0)
    wide = end64(1, len(entry), len(body), at)
    with pytest.raises(DamagedError, match="zip64 end record"):
        directory_of(body + entry + wide + end(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF))


# Any bytes at all


@given(st.binary(max_size=400), st.sampled_from([b"", b"PK\3\4", b"PK\1\2"]), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_random_bytes_read_or_are_damage(noise, head, ended):
    content = head + noise + (end(1, len(noise), len(head)) if ended else b"")
    try:
        members = directory_of(content)
    except DamagedError:
        return
    for member in members.values():
        assert 0 <= member.header < member.offset <= member.offset + member.num_bytes <= len(content)


@given(st.lists(st.tuples(st.integers(0, SMALL.stat().st_size - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
def test_changed_bytes_of_a_real_file_read_or_are_damage(changes):
    content = bytearray(SMALL.read_bytes())
    for at, byte in changes:
        content[at] = byte
    try:
        members = directory_of(bytes(content))
    except DamagedError:
        return
    ordered = sorted(members.values(), key=lambda member: member.header)
    assert all(one.offset + one.num_bytes <= other.header for one, other in pairwise(ordered))
