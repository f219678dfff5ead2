"""A model's parameters by name, and names without what wrappers put before them. Pure."""

from __future__ import annotations

from auditor.model.catalog import Catalog, Role, Tensor

WRAPPERS = (
    "module.",
    "_orig_mod.",
    "base_model.model.",
    "base_model.",
    "params.",
    "model.",
    "transformer.",
    "gpt_neox.",
)
"""What wrappers and heads put before a model's own names."""


def bare(name: str) -> str:
    """A name without what wrappers put before it.

    >>> bare("module.model.layers.0.norm.weight"), bare("transformer.h.0.ln_1.weight")
    ('layers.0.norm.weight', 'h.0.ln_1.weight')
    """
    while True:
        prefix = next((wrapper for wrapper in WRAPPERS if name.startswith(wrapper)), "")
        if not prefix:
            return name
        name = name.removeprefix(prefix)


def parameters(catalog: Catalog) -> dict[str, Tensor]:
    """Name to tensor, of what a model holds: parameters before masters before buffers.

    Names with braces are left out: in a rule they would be words.
    """
    roles = (Role.BUFFER, Role.MASTER, Role.PARAMETER)
    return {tensor.name: tensor for role in roles for tensor in catalog.tensors
            if tensor.role is role and "{" not in tensor.name}  # fmt: skip
