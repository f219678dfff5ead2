"""The pickle of a single plain tensor, as ``torch.save(tensor)`` writes it, recognised as a whole.

Checkpoints of ``torch.distributed.checkpoint`` hold a million of them, which differ in a few numbers. What fits this
one pattern from its first byte to its last can do nothing but rebuild that tensor; everything else goes to
:class:`~auditor.containers.pickle_machine.PickleMachine`. Source: torch ``torch/_tensor.py`` (``_reduce_ex_internal``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBER = rb"(?:K.|M..|J....)"
_TUPLE = rb"(?:\)|%b\x85q.|%b{2}\x86q.|%b{3}\x87q.|\(%b{4,64}tq.)" % ((_NUMBER,) * 4)
_PLAIN = re.compile(
    rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\nq\x00\(\(X\x07\x00\x00\x00storageq\x01"
    rb"ctorch\n(?P<kind>[A-Za-z0-9]{1,20}Storage)\nq\x02X\x01\x00\x00\x00(?P<key>[0-9])q\x03"
    rb"X(?:\x03\x00\x00\x00cpu|\x06\x00\x00\x00cuda:[0-9]|\x07\x00\x00\x00cuda:[0-9][0-9])q\x04"
    rb"(?P<count>%b)tq\x05Q(?P<offset>%b)(?P<shape>%b)(?P<strides>%b)[\x88\x89]"
    rb"ccollections\nOrderedDict\nq.\)Rq.tq.Rq.\." % (_NUMBER, _NUMBER, _TUPLE, _TUPLE),
    re.DOTALL,
)
_EACH = re.compile(rb"K(.)|M(..)|J(....)", re.DOTALL)
MAX_BYTES = 1024


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """What the pickle says."""

    storage_class: str
    key: str
    num_elements: int
    """Of the storage."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def plain_tensor(data: bytes) -> PlainTensor | None:
    """The tensor, if ``data`` is the pickle of one and nothing else."""
    found = _PLAIN.fullmatch(data) if len(data) <= MAX_BYTES else None
    if found is None:
        return None
    (count,), (offset,) = _numbers(found["count"]), _numbers(found["offset"])
    shape, strides = _numbers(found["shape"]), _numbers(found["strides"])
    return PlainTensor(found["kind"].decode(), found["key"].decode(), count, offset, shape, strides)


def _numbers(raw: bytes) -> tuple[int, ...]:
    """The numbers of a tuple, or one number. What closes a tuple holds none: its memo's index comes last."""
    found, at = [], 1 if raw[:1] == b"(" else 0
    while (each := _EACH.match(raw, at)) is not None:
        found.append(int.from_bytes(each[each.lastindex or 0], "little", signed=each.lastindex == 3))
        at = each.end()
    return tuple(found)
