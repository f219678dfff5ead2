"""One module per framework's layout, each reading names, headers and small metadata into a Catalog."""
