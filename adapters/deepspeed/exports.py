"""Exports that lie in a run's folder, or in one beside its steps: what zero_to_fp32 makes.

Nothing in them says of which step they are. By default it is the one that ``latest`` named; it may have moved on since,
so that the export is held against that step with doubt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from auditor.adapters.adapter import Folder
from auditor.adapters.catalog_builder import CatalogBuilder
from auditor.adapters.deepspeed.records import Shapes, step_pointer
from auditor.adapters.hugging_face.files import MODEL_KINDS, Kind, StoredArray, open_json, open_weights
from auditor.model.catalog import FileState, Role
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import Export
from auditor.model.region import whole
from auditor.storage.store import StorageError, Store, join

_MAX_FOLDERS = 64
"""Folders beside the step that are looked into."""


def add_exports(
    builder: CatalogBuilder, store: Store, step: str, shapes: Shapes, tied: Mapping[str, str]
) -> None:  # fmt: skip
    """Hold the run's exports against the step in folder ``step``, if the pointer names it.

    ``shapes``: the model's parameters; ``tied``: later names of them to the first. An export that can't be read is no
    fault of the step.
    """
    above, _, own = step.rpartition("/")
    try:
        run = Folder.read(store, above)
        pointer = step_pointer(store, run, "latest") if own else None
        if pointer is None or pointer.target != step:
            return
        for folder in _folders(store, run):
            _add(builder, store, folder, shapes, tied)
    except StorageError:
        return


def _folders(store: Store, run: Folder) -> Iterator[Folder]:
    """The run's folder, and those in it that hold nothing of DeepSpeed's own."""
    yield run
    for name in [*run.folders][:_MAX_FOLDERS]:
        folder = Folder.read(store, join(run.path, name))
        if not any(file.endswith("_states.pt") for file in folder.files):
            yield folder


def _files(folder: Folder) -> list[tuple[str, Kind]]:
    for kind in MODEL_KINDS:
        names = [name for name in folder.files if name == kind.single or kind.place(name)]
        if names:
            return [(name, kind) for name in sorted(names)]
    return []


def _add(builder: CatalogBuilder, store: Store, folder: Folder, shapes: Shapes, tied: Mapping[str, str]) -> None:
    arrays: dict[str, tuple[int, str, StoredArray]] = {}
    opened = [(kind, open_weights(store, folder, name, kind)) for name, kind in _files(folder)]
    if not opened or any(one.state is not FileState.PRESENT or one.content is None for _, one in opened):
        return
    for kind, one in opened:
        number = builder.file(one.as_file(folder.path, kind.container, Coordinate()))
        path = join(folder.path, one.name)
        arrays |= {key: (number, path, array) for key, array in (one.content.arrays if one.content else {}).items()}
    if len(shapes.keys() & arrays.keys()) * 2 < len(shapes):
        return  # Another model's, or under other names.
    for key, (number, path, array) in arrays.items():
        source = tied.get(key, key)
        if array.dtype is not None and source in shapes and array.shape == shapes[source]:
            called = f"{key}@{path.rpartition('/')[2]}"
            tensor = builder.tensor(called, Role.PARAMETER, array.dtype, array.shape, 1 << 41)
            region = whole(array.shape)
            builder.piece(tensor, number, array.offset, region, Coordinate(), key=key, strides=array.strides)
            builder.exports.append(Export(called, source, join(folder.path, opened[0][1].name), doubtful=True))
    config = open_json(store, folder, "config.json").content if "config.json" in folder.files else None
    untied = not (config and config.get("tie_word_embeddings", True))
    wanted = [*shapes, *(tied if untied else ())]
    empty = {key for key, (_, _, array) in arrays.items() if 0 in array.shape and 0 not in shapes.get(key, ())}
    lacking = [key for key in wanted if key not in arrays or key in empty]
    builder.exports += [Export("", key, join(folder.path, opened[0][1].name), doubtful=True) for key in lacking]
