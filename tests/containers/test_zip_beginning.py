"""Members of a zip file told from its beginning, on items that torch wrote."""

import io
import random
import zipfile

import pytest

from auditor.containers.damage import DamagedError, UnsupportedError
from auditor.containers.dcp_items import items_from_the_end
from auditor.containers.torch_zip import StoredTensor, read_torch_file, tensor_at
from auditor.containers.zip_beginning import members_from
from auditor.containers.zip_directory import read_directory
from auditor.storage.local import LocalStore
from auditor.storage.store import read_bytes
from tests.paths import ROOT

FOLDER = ROOT / "tests" / "fixtures" / "dcp" / "fsdp2_2" / "step-4"


@pytest.fixture(scope="module")
def items():
    """Every tensor of a data file: its content, its members by its directory, what it holds."""
    with LocalStore(FOLDER).open("__1_0.distcp") as handle:
        return [
            (read_bytes(window, 0, window.num_bytes), read_directory(window), read_torch_file(window).tree)
            for window in items_from_the_end(handle)
            if isinstance(read_torch_file(window).tree, StoredTensor)
        ]


def test_the_same_as_by_the_directory(items):
    assert len(items) > 20
    for content, members, tree in items:
        assert {member.name: member for member in members_from(content)} == members
        data = next(member.offset for member in members.values() if member.name.endswith("data/0"))

        assert vars_of(tensor_at(content[: data + 1])) == vars_of(tree)


def vars_of(tensor):
    return tensor.dtype, tensor.shape, tensor.strides, tensor.offset


def test_the_last_member_may_go_on(items):
    content, members, _ = items[0]
    data = next(member for member in members.values() if member.name.endswith("data/0"))
    *_, last = members_from(content[: data.offset + 1])
    assert (last.name, last.offset, last.num_bytes) == (data.name, data.offset, -1)


def test_signatures_in_the_data_end_nothing(items):
    content, members, _ = items[0]
    data = next(member for member in members.values() if member.name.endswith("data/0"))
    at = data.offset
    spoiled = content[:at] + b"PK\x07\x08" * (data.num_bytes // 4) + content[at + data.num_bytes // 4 * 4 :]
    assert [member.offset for member in members_from(spoiled)][: len(members) - 2] == [
        member.offset for member in members.values()
    ][: len(members) - 2]


def test_other_files_are_refused():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"a" * 1000)
    for content in (b"", b"PK", b"no zip", buffer.getvalue()):
        with pytest.raises(DamagedError):
            [*members_from(content)]


def test_whatever_is_cut_or_changed_is_damage(items):
    source = random.Random(1)
    for _ in range(600):
        content = bytearray(source.choice(items)[0])
        for _ in range(source.randrange(4)):
            content[source.randrange(len(content))] = source.randrange(256)
        try:
            tensor_at(bytes(content[: source.randrange(len(content))]))
        except (DamagedError, UnsupportedError):
            continue
