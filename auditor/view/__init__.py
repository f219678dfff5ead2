"""The Zarr view: checkpoints of any layout as one read-only Zarr v3 tree, assembled from the original files."""
