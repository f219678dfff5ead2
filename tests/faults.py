"""Named damage, made on purpose on copies of real checkpoints: bytes of a stored tensor, in place."""

import numpy as np

from auditor.adapters.adapter import Options
from auditor.discovery import discover
from auditor.storage.local import LocalStore


def catalog_of(run, step):
    """The Catalog of one step of the run in a folder."""
    store = LocalStore(run)
    (source,) = [s for r in discover(store) for s in r.steps if s.match.step == step]
    return source.adapter.read(store, source.folder, source.match, Options())


def rows_of(catalog, name, role, place=""):
    """The pieces of a tensor's replica, in C order of the tensor."""
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role.value) == (name, role)]
    (replica,) = [n for n, where in enumerate(catalog.replicas[number]) if not place or str(where) == place]
    rows = [catalog.pieces[int(row)] for row in catalog.rows_of(number, replica)]
    return sorted(rows, key=lambda piece: str(piece.region.start))


def poke(run, step, name, role="parameter", place="", element=0, value=None, flip=None, part=0):
    """Set one element's bits to ``value``, or flip the bits ``flip``; the file is changed in place."""
    catalog = catalog_of(run, step)
    piece = rows_of(catalog, name, role, place)[part]
    width = catalog.tensors[piece.tensor].dtype.bits // 8
    path = run / catalog.files[piece.file].name
    content = bytearray(path.read_bytes())
    at = piece.offset + element * width
    old = int.from_bytes(content[at : at + width], "little")
    content[at : at + width] = (old ^ flip if value is None else value).to_bytes(width, "little")
    path.write_bytes(content)
    return catalog.files[piece.file].name


def rewrite(run, step, name, role, change, place=None):
    """Put ``change(bits)`` in the place of every piece's value bits, in C order, of all replicas or of one."""
    catalog = catalog_of(run, step)
    (number,) = [n for n, t in enumerate(catalog.tensors) if (t.name, t.role.value) == (name, role)]
    carrier = np.dtype(catalog.tensors[number].dtype.carrier)
    found = [catalog.pieces[row] for row in catalog.rows_by_tensor[number].tolist()]
    for piece in sorted(found, key=lambda one: (one.replica, one.region.start)):
        if place is not None and str(catalog.replicas[number][piece.replica]) != place:
            continue
        path = run / catalog.files[piece.file].name
        content = bytearray(path.read_bytes())
        count = int(np.prod(piece.shape))
        bits = np.frombuffer(bytes(content), carrier, count, piece.offset)
        new = np.asarray(change(bits.copy()), carrier)
        content[piece.offset : piece.offset + count * carrier.itemsize] = new.tobytes()
        path.write_bytes(content)


def float32_bits(value):
    """The bits of a float32."""
    return int(np.float32(value).view(np.uint32))
