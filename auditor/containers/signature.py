"""What a file that nothing reads looks like, from its first bytes: for the message about it."""

from __future__ import annotations

from auditor.storage.store import Handle, read_bytes

_BEGINNINGS = (
    (b"PK\x03\x04", "a zip file, as torch.save and numpy.savez write"),
    (b"PK\x05\x06", "an empty zip file"),
    (b"\x80", "a pickle"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"{", "JSON"),
    (b"[", "JSON"),
)
_TAR_AT, _TAR_BLOCK = 257, 262
"""Where a tar archive says that it is one. Source: POSIX.1-1988, ustar."""


def looks_like(handle: Handle) -> str:
    """What a file begins as.

    Raises:
        StorageError: storage did not give its first bytes.
    """
    block = read_bytes(handle, 0, min(_TAR_BLOCK, handle.entry.num_bytes))
    head = block[:9]
    if not head:
        return "an empty file"
    if block[_TAR_AT:] == b"ustar":
        return "a tar archive, as NeMo's .nemo files are (unpack it: tar -xf FILE)"
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") <= handle.entry.num_bytes:
        return "a safetensors file"
    found = next((what for beginning, what in _BEGINNINGS if head.startswith(beginning)), "")
    text = head.isascii() and "".join(head.decode("ascii", "replace").split()).isprintable()
    return found or ("text" if text else "nothing that is known")
