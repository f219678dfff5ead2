"""What other people's adapters are tested with. The auditor itself imports nothing of it."""
