"""Joins what was judged step by step into findings over the run: since when, until when, how it grew. Pure."""
