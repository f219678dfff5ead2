"""States as ``numpy.savez`` writes them: an ``.npz`` file a step. Names are paths joined by slashes or dots."""

from __future__ import annotations

from auditor.adapters.optax.paths import MODELS
from auditor.adapters.optax.tree import OptaxTree
from auditor.adapters.state_files import StateFile, StateFiles
from auditor.containers.npz_file import read_npz
from auditor.storage.store import Handle


class Npz(StateFiles):
    """The adapter."""

    name = "npz"
    looks_for = "files *.npz of numpy.savez with params or an optimizer's state, each a step, or a folder of them"
    what = "npz file of arrays"
    suffixes = (".npz",)

    def read_file(self, handle: Handle) -> StateFile:
        """One file without its weights."""
        return read_npz(handle)

    def is_state(self, tree: OptaxTree) -> bool:
        """Whether some arrays are called or used as parameters: data sets are kept in such files, too."""
        named = any(path[0] in MODELS for path in tree.paths)
        return named or any(root is not None for root in tree.root_of)

    def begins(self, head: bytes) -> bool:
        """Whether it begins as a zip file."""
        return head.startswith(b"PK")
