"""Auditing what lies in a bucket again and again, from cron: what changed is read, what is wrong is told once."""
