"""Reports: for people at a terminal, for machines, and the pages about invariants. They return text, print nothing."""
