"""One torch file a rank."""
