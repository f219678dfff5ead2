"""What a Catalog holds besides its columns, as JSON: the attributes of ``steps/<n>/catalog``.

Files are called by their path below the step. Numbers that JSON lacks are the strings ``NaN``, ``Infinity`` and
``-Infinity``, as in Zarr's own documents.
"""

from __future__ import annotations

import math
from typing import Any

from auditor.model.catalog import Catalog, Problem, Scalar
from auditor.model.mesh import Coordinate
from auditor.model.optimizer import ParameterGroup


def description(catalog: Catalog) -> dict[str, Any]:
    """The Catalog without its piece table."""
    pieces, within = catalog.pieces, catalog.within
    return {
        "tensors": [[t.name, t.role.value, t.dtype.name, list(t.shape), t.order] for t in catalog.tensors],
        "replicas": [[place.as_dict() for place in places] for places in catalog.replicas],
        "files": [
            [within(f.name), f.num_bytes, f.state.value, f.coordinate.as_dict(), f.detail] for f in catalog.files
        ],
        "coordinates": [place.as_dict() for place in pieces.coordinates],
        "keys": list(pieces.keys),
        "scalars": [_scalar(catalog, one) for one in catalog.scalars],
        "problems": [_problem(catalog, one) for one in catalog.problems],
        "groups": [_group(catalog, one) for one in catalog.groups],
        "ties": [{"names": list(tie.names), "source": tie.source} for tie in catalog.ties],
        "not_implied": catalog.not_implied,
    }


def _scalar(catalog: Catalog, one: Scalar) -> dict[str, Any]:
    found = {"name": one.name, "value": _value(one.value), **_place(catalog, one.file, one.coordinate)}
    kept = {"dtype": one.dtype.name} if one.dtype else {}
    named = {key: value for key, value in (("tensor", one.tensor), ("optimizer", one.optimizer)) if value}
    return {**found, **named, **kept}


def _problem(catalog: Catalog, one: Problem) -> dict[str, Any]:
    return {
        "kind": one.kind.name.lower(), "message": one.message, **_place(catalog, one.file, one.coordinate),
        "tensor": one.tensor, "order": one.order, "ignored": one.ignored,
    }  # fmt: skip


def _place(catalog: Catalog, file: str, coordinate: Coordinate) -> dict[str, Any]:
    return {"file": catalog.within(file), "coordinate": coordinate.as_dict()}


def _group(catalog: Catalog, one: ParameterGroup) -> dict[str, Any]:
    return {
        "number": one.number, **_place(catalog, one.file, one.coordinate), "optimizer": one.optimizer,
        "step": _value(one.step),
        "hyperparameters": {name: _value(value) for name, value in one.hyperparameters.items()},
        "parameters": None if one.parameters is None else list(one.parameters), "from_state": one.from_state,
        "of_model": one.of_model,
    }  # fmt: skip


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
