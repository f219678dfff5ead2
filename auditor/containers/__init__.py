"""File formats: which named arrays lie at which byte ranges. Nothing here knows of ranks."""
