"""Writes OCDBT databases for tests, honest ones and others: TensorStore's layout, built by hand."""

import struct

import google_crc32c

MANIFEST, BTREE = 0x0CDB3A2A, 0x0CDB20DE


def varint(number):
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def varints(numbers):
    return b"".join(map(varint, numbers))


def envelope(magic, body, compressed=False, length=None, checksum=None):
    """A node; ``length`` and ``checksum`` may be lies."""
    head = varint(0) + varint(int(compressed))
    if compressed:
        import zstandard

        body = zstandard.compress(body)
    total = 12 + len(head) + len(body) + 4
    raw = struct.pack(">I", magic) + struct.pack("<Q", total if length is None else length) + head + body
    return raw + struct.pack("<I", google_crc32c.value(raw) if checksum is None else checksum)


def strings(values):
    """Lengths of what each string shares with the one before, and of the rest; then the rests."""
    prefixes, rests, last = [], [], b""
    for value in values:
        shared = 0
        while shared < min(len(last), len(value)) and last[shared] == value[shared]:
            shared += 1
        prefixes.append(shared)
        rests.append(value[shared:])
        last = value
    return prefixes[1:], [len(rest) for rest in rests], b"".join(rests)


def file_table(files, bases=None):
    prefixes, lengths, rests = strings([file.encode() for file in files])
    bases = [0] * len(files) if bases is None else bases
    return varint(len(files)) + varints(prefixes) + varints(lengths) + varints(bases) + rests


def leaf(entries, files=(), height=0):
    """``entries``: key to bytes held inline, or (file number, offset, length)."""
    keys = sorted(entries)
    prefixes, lengths, rests = strings([key.encode() for key in keys])
    values = [entries[key] for key in keys]
    apart = [value for value in values if isinstance(value, tuple)]
    return b"".join([
        bytes([height]), file_table(files), varint(len(keys)), varints(prefixes), varints(lengths), rests,
        varints(value[2] if isinstance(value, tuple) else len(value) for value in values),
        varints(int(isinstance(value, tuple)) for value in values),
        varints(value[0] for value in apart), varints(value[1] for value in apart),
        *(value for value in values if isinstance(value, bytes)),
    ])  # fmt: skip


def inner(children, files, height=1):
    """``children``: first key to (file number, offset, length, length of the prefix that all keys below share)."""
    keys = sorted(children)
    prefixes, lengths, rests = strings([key.encode() for key in keys])
    places = [children[key] for key in keys]
    return b"".join([
        bytes([height]), file_table(files), varint(len(keys)), varints(prefixes), varints(lengths),
        varints(place[3] for place in places), rests, *(varints(place[at] for place in places) for at in range(3)),
        varints(1 for _ in places), varints(place[2] for place in places), varints(0 for _ in places),
    ])  # fmt: skip


def manifest(roots, files, kind=0, compressed=False):
    """``roots``: (height, file number, offset, length, number of keys), oldest first."""
    count = len(roots)
    body = b"".join([
        bytes(16), varint(kind), varint(1024), varint(10**8), bytes([4]), varint(1), struct.pack("<i", 0),
        file_table(files), varint(count), varints(range(1, count + 1)), bytes(root[0] for root in roots),
        *(varints(root[at] for root in roots) for at in (1, 2, 3)), varints(root[4] for root in roots),
        varints(root[3] for root in roots), varints(0 for _ in roots), bytes(8 * count), varint(0),
    ])  # fmt: skip
    return envelope(MANIFEST, body, compressed)


def database(entries, values=b"", compressed=False):
    """The objects of a database of one leaf; out-of-line values lie in ``d/values``."""
    node = envelope(BTREE, leaf(entries, ["d/values"]), compressed)
    return {
        "manifest.ocdbt": manifest([(0, 0, 0, len(node), len(entries))], ["d/node"], compressed=compressed),
        "d/node": node, "d/values": values,
    }  # fmt: skip
