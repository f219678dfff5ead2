"""Statements that must hold, as small pure functions over Catalog and Observations. No I/O, no framework names."""
