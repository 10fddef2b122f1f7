"""The `hisparse` command: one file per command, and no logic that a library user would miss."""
