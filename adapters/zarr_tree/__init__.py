"""Zarr trees as docs/zarr-layout.md has them."""
