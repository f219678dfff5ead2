"""Node names: tensor names made legal in Zarr, reversibly.

Zarr forbids ``/``, names of dots alone and the prefix ``__``. Everything outside letters, digits and ``_.-=,@`` is
percent-encoded as UTF-8, and so is the first character where the name as a whole would be illegal.
"""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

_SAFE = "_.-=,@"


def escape(name: str) -> str:
    """The node name of ``name``.

    >>> escape("a/b"), escape(".."), escape("__x"), escape("")
    ('a%2Fb', '%2E.', '%5F_x', '%')
    """
    if not name:
        return "%"
    quoted = quote(name, safe=_SAFE, errors="surrogatepass")
    if quoted.startswith("__") or not quoted.strip("."):
        quoted = f"%{ord(quoted[0]):02X}{quoted[1:]}"
    # `zarr.json` is the key of every node's own metadata, `c` that of an array's chunks; nodes with these names clash.
    return f"%{ord(quoted[0]):02X}{quoted[1:]}" if quoted in ("zarr.json", "c") else quoted


def unescape(node: str) -> str:
    """The name that :func:`escape` turned into ``node``; a node name that encodes no text is taken as it is."""
    try:
        return "" if node == "%" else unquote_to_bytes(node).decode("utf-8", "surrogatepass")
    except UnicodeError:
        return node
