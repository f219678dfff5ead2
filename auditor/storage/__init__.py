"""Where bytes come from: one small read-only protocol, and the places that follow it."""
