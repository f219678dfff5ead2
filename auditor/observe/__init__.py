"""Measures weights: one streaming pass for digests and statistics, a targeted second one for differences."""
